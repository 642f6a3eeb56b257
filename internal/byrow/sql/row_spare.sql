-- Find rows of one limit that nothing was taken from for long, on all servers.
--
-- $1 name
-- $2 until_us                 the latest ts of theirs
-- $3 after_key, $4 after_shard, $5 limit   at most $5 rows after this one, by key and shard
--
-- Returns key, shard, value, ts, capacity, taken, and the last fencing number and the last end of leases. Which of them are full is decided elsewhere.
SELECT b.key, b.shard, b.value, b.ts, b.capacity, b.taken,
    CASE WHEN b.fence IS NOT NULL THEN array_remove(ARRAY[b.fence, b.last_us], NULL) END
FROM ratelimit.buckets AS b
WHERE b.name = $1::text AND b.ts <= $2::bigint AND b.key >= $3::text AND (b.key > $3::text OR b.shard > $4::integer)
ORDER BY b.key, b.shard
LIMIT $5::integer
