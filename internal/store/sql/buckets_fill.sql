-- Fill buckets to capacity: debts are forgotten, fixed windows keep their phase.
--
-- $1 name[], $2 key[], $3 shard[]                         the buckets, distinct and sorted
-- $4 capacity[], $5 step_us[], $6 phase_us[], $7 as_of_us, $8 tolerance_us[]   as in buckets_take.sql
--
-- An upsert and not a DELETE, which would find its rows through the snapshot and so take SIREAD locks. ts
-- does not move back, as in every other statement: what arrived until then has been credited.
WITH asked AS MATERIALIZED (
    SELECT u.name, u.key, u.shard, u.capacity, u.step_us, u.tolerance_us, u.ord,
        u.phase_us + (clock.now_us - u.phase_us) / u.step_us * u.step_us AS ts
    FROM unnest((SELECT $1::text[]), $2::text[], $3::integer[], $4::float8[], $5::bigint[], $6::bigint[], $8::bigint[])
            WITH ORDINALITY AS u (name, key, shard, capacity, step_us, phase_us, tolerance_us, ord),
        (SELECT coalesce($7::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us) AS clock
)
INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts)
SELECT a.name, a.key, a.shard, a.capacity, a.ts FROM asked AS a ORDER BY a.ord
ON CONFLICT (name, key, shard) DO UPDATE SET (value, ts) = (
    SELECT a.capacity, CASE WHEN b.ts > excluded.ts + a.tolerance_us AND b.ts > excluded.ts + (coalesce($7::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) - excluded.ts) / a.step_us * a.step_us + a.tolerance_us THEN excluded.ts ELSE greatest(b.ts, excluded.ts) END
    FROM asked AS a WHERE a.name = b.name AND a.key = b.key AND a.shard = b.shard)
