-- Take from one bucket, by a statement that goes to one server, as row_read.sql, at the instant that clock.sql returned before it in
-- the same round trip. Citus lets no statement return an instant that it looks up.
--
-- $1 name, $2 key, $3 shard   the bucket
-- $4 cost, $5 capacity, $6 rate, $7 step_us, $8 steps, $9 phase_us, $10 lowest, $11 tolerance_us   as in bucket_take.sql
--
-- Returns value, ts, capacity, taken and leases after the decision. It returns no row, and changes nothing, if there is too little, if the row is a window of
-- another capacity, or if ts is ahead of the clock: by a wrong clock, or after a long wait for the row. The server of the connection evaluates all expressions except
-- constants before it forwards the statement.
INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity)
VALUES ($1::text, $2::text, $3::integer, $5::float8 - $4::float8, $9::bigint + (current_setting('ratelimit.now_us')::bigint - $9::bigint) / $7::bigint * $7::bigint, $5::float8)
ON CONFLICT (name, key, shard) DO UPDATE SET
    value = least($5::float8, b.value + ((greatest(excluded.ts - b.ts, 0) + $7::bigint - 1) / $7::bigint)::float8 * $6::float8 / $8::float8) - $4::float8,
    ts = greatest(b.ts, excluded.ts),
    capacity = CASE WHEN b.capacity = $5::float8 OR least($5::float8, b.value + ((greatest(excluded.ts - b.ts, 0) + $7::bigint - 1) / $7::bigint)::float8 * $6::float8 / $8::float8) >= $5::float8 THEN $5::float8 ELSE b.capacity END
WHERE least($5::float8, b.value + ((greatest(excluded.ts - b.ts, 0) + $7::bigint - 1) / $7::bigint)::float8 * $6::float8 / $8::float8) - $4::float8 >= $10::float8
    AND (b.capacity = $5::float8 OR $7::bigint = 1)
    AND NOT (b.ts > excluded.ts + $11::bigint)
RETURNING b.value, b.ts, b.capacity, b.taken, b.leases
