-- Read the leases on buckets, whose rows this transaction has locked in an earlier statement: a statement that waits for a row sees the leases
-- of before the wait.
--
-- $1 name[], $2 key[]   the buckets
--
-- Returns ord: the place of the bucket, and fence, until_us and slots of each lease, in the order in which they were taken.
SELECT a.ord, l.fence, l.until_us, l.slots
FROM unnest((SELECT $1::text[]), $2::text[]) WITH ORDINALITY AS a (name, key, ord),
    LATERAL (SELECT r.fence, r.until_us, r.slots FROM ratelimit.leases AS r
        WHERE r.name = a.name AND r.key = a.key AND r.slots > 0 ORDER BY r.fence LIMIT 1000000) AS l
ORDER BY a.ord, l.fence
