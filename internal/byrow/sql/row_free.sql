-- Lock one row to the end of the transaction, and read it, unless another transaction holds it. It goes to one server, as
-- row_read.sql.
--
-- $1 name, $2 key, $3 shard   the row
--
-- Returns value, ts, capacity, taken, and the last fencing number and the last end of leases, or no row if another transaction holds the row, or if it does not exist.
SELECT b.value, b.ts, b.capacity, b.taken,
    CASE WHEN b.fence IS NOT NULL THEN array_remove(ARRAY[b.fence, b.last_us], NULL) END
FROM ratelimit.buckets AS b WHERE b.name = $1::text AND b.key = $2::text AND b.shard = $3::integer
FOR UPDATE SKIP LOCKED
