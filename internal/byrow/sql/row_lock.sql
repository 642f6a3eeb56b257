-- Lock one row to the end of the transaction, and return its columns. It goes to one server, as row_read.sql.
--
-- $1 name, $2 key, $3 shard   the row
-- $4 capacity                 of a row that is made
-- $5 ts                       of a row that is made, by which that one is known
--
-- Returns value, ts, capacity, taken, and the last fencing number, for which row_leases.sql adds the leases. An upsert for the reason in buckets_lock.sql.
INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity)
VALUES ($1::text, $2::text, $3::integer, $4::float8, $5::bigint, $4::float8)
ON CONFLICT (name, key, shard) DO UPDATE SET value = b.value
RETURNING b.value, b.ts, b.capacity, b.taken, CASE WHEN b.fence IS NOT NULL THEN ARRAY[b.fence] END
