-- Read one bucket's row without locking or changing it, where Citus distributes them: the row's name, key and shard are
-- parameters, so that the statement goes to the one server that has it.
--
-- $1 name, $2 key, $3 shard   the row
--
-- Returns value, ts, capacity, taken and leases, or no row: a full bucket.
SELECT b.value, b.ts, b.capacity, b.taken, b.leases
FROM ratelimit.buckets AS b WHERE b.name = $1::text AND b.key = $2::text AND b.shard = $3::integer
