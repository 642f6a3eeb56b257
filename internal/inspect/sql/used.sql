-- Looks at $3 rows of buckets, of limit $1 ('': of any), in the order of the primary key. Returns the names and keys of the $4 that were
-- changed since $2 and of which the largest part was used then, and how many rows were read.
SELECT u.name, u.key, max(u.n)
FROM (
    SELECT looked.*, count(*) OVER () AS n
    FROM (
        SELECT b.name, b.key, b.value, b.capacity, b.ts FROM ratelimit.buckets AS b
        WHERE $1 = '' OR b.name = $1
        ORDER BY b.name, b.key, b.shard
        LIMIT $3::integer
    ) AS looked
) AS u
WHERE u.ts >= $2 AND u.capacity > 0 AND u.value < u.capacity
GROUP BY u.name, u.key
ORDER BY sum(u.value) / sum(u.capacity), u.name, u.key
LIMIT $4::integer
