-- Delete one row that this transaction has locked. It goes to one server, as row_read.sql.
--
-- $1 name, $2 key, $3 shard   the row
DELETE FROM ratelimit.buckets AS b WHERE b.name = $1::text AND b.key = $2::text AND b.shard = $3::integer
