-- Find those of the rows that are not free: somebody holds them, or they are not there and may be being made.
--
-- $1 name[], $2 key[], $3 shard[]   the rows
--
-- Returns name, key and shard of each. The others are locked, up to the end of the statement's own transaction, as in
-- buckets_lock_free.sql.
SELECT a.name, a.key, a.shard
FROM unnest((SELECT $1::text[]), $2::text[], $3::integer[]) AS a (name, key, shard)
LEFT JOIN LATERAL (
    SELECT r.ts FROM ratelimit.buckets AS r WHERE r.name = a.name AND r.key = a.key AND r.shard = a.shard
    FOR NO KEY UPDATE SKIP LOCKED) AS b ON true
WHERE b.ts IS NULL
