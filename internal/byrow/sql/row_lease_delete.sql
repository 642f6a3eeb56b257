-- Delete leases on a bucket whose row this transaction has locked. It goes to one server, as row_read.sql.
--
-- $1 name, $2 key   the bucket
-- $3 fence          of the lease; null: all
DELETE FROM ratelimit.leases AS l WHERE l.name = $1::text AND l.key = $2::text AND ($3::bigint IS NULL OR l.fence = $3::bigint)
