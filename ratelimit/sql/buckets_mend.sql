-- Bring back to the present buckets whose ts a wrong clock left in the future; their value stays. A row that is gone
-- comes back full, which is what no row stands for.
--
-- $1 name[], $2 key[], $3 shard[]   the buckets, distinct and sorted
-- $4 step_us[], $5 phase_us[], $6 tolerance_us[], $7 as_of_us, $8 capacity[]   as in buckets_take.sql
INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts)
SELECT u.name, u.key, u.shard, u.capacity, u.phase_us + (clock.now_us - u.phase_us) / u.step_us * u.step_us
FROM unnest((SELECT $1::text[]), $2::text[], $3::integer[], $4::bigint[], $5::bigint[], $6::bigint[], $8::float8[])
        WITH ORDINALITY AS u (name, key, shard, step_us, phase_us, tolerance_us, capacity, ord),
    (SELECT coalesce($7::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us) AS clock
ORDER BY u.ord
ON CONFLICT (name, key, shard) DO UPDATE SET ts = excluded.ts
WHERE b.ts > excluded.ts + (SELECT u.tolerance_us FROM unnest((SELECT $1::text[]), $2::text[], $3::integer[], $6::bigint[]) AS u (name, key, shard, tolerance_us)
    WHERE u.name = b.name AND u.key = b.key AND u.shard = b.shard)
