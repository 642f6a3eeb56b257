-- Looks at $3 rows at most, from limit $1 and key $2 on, in the order of the primary key. Returns name, key, shard, value and ts of
-- the buckets that owe in one of the rows read, and n, how many rows were read so far, at most $4. When it looked at $3, the last
-- row is among them, whether it owes or not.
SELECT d.name, d.key, d.shard, d.value, d.ts, d.n
FROM (
    SELECT looked.*, min(looked.value) OVER (PARTITION BY looked.name, looked.key) AS least,
        row_number() OVER (ORDER BY looked.name, looked.key, looked.shard) AS n
    FROM (
        SELECT b.name, b.key, b.shard, b.value, b.ts FROM ratelimit.buckets AS b
        WHERE (b.name, b.key) >= ($1, $2)
        ORDER BY b.name, b.key, b.shard
        LIMIT $3::integer
    ) AS looked
) AS d
WHERE d.least < 0 OR d.n = $3::integer
ORDER BY d.name, d.key, d.shard
LIMIT $4::integer
