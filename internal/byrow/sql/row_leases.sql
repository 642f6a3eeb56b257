-- Read the leases on one bucket, whose row this transaction has locked. It goes to one server, as row_read.sql.
--
-- $1 name, $2 key   the bucket
--
-- Returns fence, until_us and slots of each lease, in the order in which they were taken.
SELECT l.fence, l.until_us, l.slots FROM ratelimit.leases AS l
WHERE l.name = $1::text AND l.key = $2::text AND l.slots > 0
ORDER BY l.fence
