-- Read buckets without locking or changing them.
--
-- $1 name[], $2 key[], $3 shard[]   the buckets
-- $4 as_of_us                       the instant to report as now; null: the database's clock
--
-- Returns one row for each bucket, in the order asked: value, ts and capacity (null: no row, a full bucket), taken,
-- leases: the last fencing number, and then number, end and slots of each lease, now_us, filtered: whether row level security applies to the role, so that a row may be there and not seen.
-- LIMIT 1, and the sub-select, as in spend_1.
SELECT b.value, b.ts, b.capacity, b.taken,
    CASE WHEN b.leased[1] IS NOT NULL THEN b.leased[1] || ARRAY(SELECT u.n
        FROM ratelimit.leases AS l, unnest(ARRAY[l.fence, l.until_us, l.slots]) WITH ORDINALITY AS u (n, place)
        WHERE l.name = a.name AND l.key = a.key AND l.slots > 0 ORDER BY l.fence, u.place) END AS leases,
    coalesce($4::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us,
    row_security_active('ratelimit.buckets') AS filtered
FROM unnest((SELECT $1::text[]), $2::text[], $3::integer[]) WITH ORDINALITY AS a (name, key, shard, ord)
LEFT JOIN LATERAL (SELECT r.value, r.ts, r.capacity, r.taken, r.leased FROM ratelimit.buckets AS r WHERE r.name = a.name AND r.key = a.key AND r.shard = a.shard LIMIT 1) AS b ON true
ORDER BY a.ord
