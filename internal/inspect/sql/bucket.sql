-- Returns name, key, shard, value, ts and leases of the rows of the bucket $2 of limit $1.
SELECT b.name, b.key, b.shard, b.value, b.ts,
    CASE WHEN b.fence IS NOT NULL THEN b.fence || ARRAY(SELECT u.n
        FROM ratelimit.leases AS l, unnest(ARRAY[l.fence, l.until_us, l.slots]) WITH ORDINALITY AS u (n, place)
        WHERE l.name = $1 AND l.key = $2 AND l.slots > 0 ORDER BY l.fence, u.place) END AS leases
FROM ratelimit.buckets AS b WHERE b.name = $1 AND b.key = $2 ORDER BY b.shard LIMIT 127
