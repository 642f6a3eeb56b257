-- Read the rows that a bucket is spread over, for what it holds in all, beside taking from one of them.
--
-- Parameters and answer as in buckets_read.sql. Above READ COMMITTED it returns nothing and reads nothing: it
-- would show an old snapshot, and make transactions conflict which the rows keep apart.
SELECT b.value, b.ts, b.taken, b.leases,
    coalesce($4::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us
FROM unnest((SELECT $1::text[]), $2::text[], $3::integer[]) WITH ORDINALITY AS a (name, key, shard, ord)
LEFT JOIN LATERAL (SELECT r.value, r.ts, r.taken, r.leases FROM ratelimit.buckets AS r WHERE r.name = a.name AND r.key = a.key AND r.shard = a.shard LIMIT 1) AS b ON true
WHERE current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')
ORDER BY a.ord
