-- Return the places of the rows that other transactions hold. It waits for none. A row that another transaction is inserting is not there yet,
-- and so it is not returned.
--
-- $1 name[], $2 key[], $3 shard[]   the rows
SELECT u.ord
FROM unnest((SELECT $1::text[]), $2::text[], $3::integer[]) WITH ORDINALITY AS u (name, key, shard, ord)
CROSS JOIN LATERAL (
    SELECT r.ts FROM ratelimit.buckets AS r WHERE r.name = u.name AND r.key = u.key AND r.shard = u.shard LIMIT 1) AS present
LEFT JOIN LATERAL (
    SELECT r.ts FROM ratelimit.buckets AS r WHERE r.name = u.name AND r.key = u.key AND r.shard = u.shard
    FOR NO KEY UPDATE SKIP LOCKED) AS free ON true
WHERE free.ts IS NULL
