-- Returns name, key, shard, value, ts and leases of the rows of the buckets of the keys $2 in the limits $1, in their order.
SELECT b.name, b.key, b.shard, b.value, b.ts, b.leases
FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS of (name, key, place)
CROSS JOIN LATERAL (
    SELECT r.name, r.key, r.shard, r.value, r.ts,
        CASE WHEN r.leased[1] IS NOT NULL THEN r.leased[1] || ARRAY(SELECT u.n
            FROM ratelimit.leases AS l, unnest(ARRAY[l.fence, l.until_us, l.slots]) WITH ORDINALITY AS u (n, place)
            WHERE l.name = of.name AND l.key = of.key AND l.slots > 0 ORDER BY l.fence, u.place) END AS leases
    FROM ratelimit.buckets AS r WHERE r.name = of.name AND r.key = of.key ORDER BY r.shard LIMIT 127
) AS b
ORDER BY of.place, b.shard
