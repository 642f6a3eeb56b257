-- Returns name, key, shard, value and ts of the buckets of limit $1 whose keys are $2 or later and begin with $3. It returns $4
-- buckets at most, in the order of their keys, with all rows of each. It steps from one key to the next through the primary key,
-- and ends at the first that begins with something else.
WITH RECURSIVE keys AS (
    (SELECT b.key, 1 AS n FROM ratelimit.buckets AS b WHERE b.name = $1 AND b.key >= $2 ORDER BY b.key LIMIT 1)
    UNION ALL
    SELECT following.key, keys.n + 1
    FROM keys
    CROSS JOIN LATERAL (
        SELECT b.key FROM ratelimit.buckets AS b WHERE b.name = $1 AND b.key > keys.key ORDER BY b.key LIMIT 1
    ) AS following
    WHERE keys.n < $4::integer AND starts_with(keys.key, $3)
)
SELECT b.name, b.key, b.shard, b.value, b.ts
FROM keys
CROSS JOIN LATERAL (
    SELECT r.name, r.key, r.shard, r.value, r.ts FROM ratelimit.buckets AS r
    WHERE r.name = $1 AND r.key = keys.key ORDER BY r.shard LIMIT 127
) AS b
WHERE starts_with(keys.key, $3)
ORDER BY keys.n, b.shard
