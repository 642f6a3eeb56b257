-- Read one bucket's row without locking or changing it, where Citus distributes them: the row's name, key and shard are
-- parameters, so that the statement goes to the one server that has it.
--
-- $1 name, $2 key, $3 shard   the row
--
-- Returns value, ts, capacity, taken and leases, or no row: a full bucket.
SELECT b.value, b.ts, b.capacity, b.taken,
    CASE WHEN b.fence IS NOT NULL THEN b.fence || ARRAY(SELECT u.n
        FROM ratelimit.leases AS l, unnest(ARRAY[l.fence, l.until_us, l.slots]) WITH ORDINALITY AS u (n, place)
        WHERE l.name = $1::text AND l.key = $2::text AND l.slots > 0 ORDER BY l.fence, u.place) END AS leases
FROM ratelimit.buckets AS b WHERE b.name = $1::text AND b.key = $2::text AND b.shard = $3::integer
