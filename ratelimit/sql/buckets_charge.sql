-- Charge buckets, or credit them, whatever they hold: no amount is refused, a credit ends at capacity. Where
-- the limit was raised meanwhile a bucket may hold more than that capacity, and keeps it.
--
-- $1 name[], $2 key[], $3 shard[]     the buckets, distinct and sorted
-- $4 amount[]                         tokens to charge; below zero: to credit
-- $5 capacity[], $6 rate[], $7 step_us[], $8 steps[], $9 phase_us[]   as in bucket_take.sql
-- $10 until_us[]                      a credit counts only while the current step begins no later
-- $11 as_of_us, $12 tolerance_us[]    as in bucket_take.sql
WITH asked AS MATERIALIZED (
    SELECT u.name, u.key, u.shard, u.capacity, u.rate, u.step_us, u.steps, u.tolerance_us, u.ord,
        u.phase_us + (clock.now_us - u.phase_us) / u.step_us * u.step_us AS ts,
        CASE WHEN u.amount < 0 AND u.phase_us + (clock.now_us - u.phase_us) / u.step_us * u.step_us > u.until_us THEN 0 ELSE u.amount END AS amount
    FROM unnest((SELECT $1::text[]), $2::text[], $3::integer[], $4::float8[], $5::float8[], $6::float8[],
            $7::bigint[], $8::float8[], $9::bigint[], $10::bigint[], $12::bigint[])
        WITH ORDINALITY AS u (name, key, shard, amount, capacity, rate, step_us, steps, phase_us, until_us, tolerance_us, ord),
        (SELECT coalesce($11::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us) AS clock
)
INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts)
SELECT a.name, a.key, a.shard, least(a.capacity, a.capacity - a.amount), a.ts
FROM asked AS a WHERE a.amount <> 0 ORDER BY a.ord
ON CONFLICT (name, key, shard) DO UPDATE SET (value, ts) = (
    SELECT
        least(greatest(a.capacity, b.value), least(greatest(a.capacity, b.value), b.value + ((greatest(excluded.ts - b.ts, 0) + a.step_us - 1) / a.step_us)::float8 * a.rate / a.steps) - a.amount),
        CASE WHEN b.ts > excluded.ts + a.tolerance_us THEN excluded.ts ELSE greatest(b.ts, excluded.ts) END
    FROM asked AS a WHERE a.name = b.name AND a.key = b.key AND a.shard = b.shard)
