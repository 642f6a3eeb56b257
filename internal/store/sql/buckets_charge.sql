-- Charge buckets, or credit them, whatever they hold: no amount is refused.
--
-- $1 name[], $2 key[], $3 shard[]     the buckets, distinct and sorted
-- $4 amount[]                         tokens to charge; below zero: to credit
-- $5 capacity[]                       as in bucket_take.sql; of a credit the most it may fill the bucket to
-- $6 rate[], $7 step_us[], $8 steps[], $9 phase_us[]   as in bucket_take.sql
-- $10 until_us[]                      a credit counts only while the current step, also that of the clock behind the lock, begins no later
-- $11 as_of_us, $12 tolerance_us[]    as in bucket_take.sql
--
-- A charge takes from what the bucket holds now: value' = min(capacity, value + arrived) - amount. A credit needs
-- no rate: value' = min(max(capacity, value), value + amount) and the same ts give at every later instant,
-- whatever the rate is by then, what crediting now would give, because min(capacity, ..) is taken there again.
-- So it credits no time to anybody. A bucket that has no row is full; to stay so under any terms it is made as
-- one that was full in 1900: no bucket takes longer than 100 years to fill.
WITH asked AS MATERIALIZED (
    SELECT u.name, u.key, u.shard, u.capacity, u.rate, u.step_us, u.steps, u.phase_us, u.tolerance_us, u.until_us, u.ord,
        u.phase_us + (clock.now_us - u.phase_us) / u.step_us * u.step_us AS ts,
        CASE WHEN u.amount < 0 AND u.phase_us + (clock.now_us - u.phase_us) / u.step_us * u.step_us > u.until_us THEN 0 ELSE u.amount END AS amount
    FROM unnest((SELECT $1::text[]), $2::text[], $3::integer[], $4::float8[], $5::float8[], $6::float8[],
            $7::bigint[], $8::float8[], $9::bigint[], $10::bigint[], $12::bigint[])
        WITH ORDINALITY AS u (name, key, shard, amount, capacity, rate, step_us, steps, phase_us, until_us, tolerance_us, ord),
        (SELECT coalesce($11::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us) AS clock
)
INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts)
SELECT a.name, a.key, a.shard, least(a.capacity, a.capacity - a.amount), CASE WHEN a.amount < 0 THEN least(a.ts, -2208988800000000) ELSE a.ts END
FROM asked AS a WHERE a.amount <> 0 ORDER BY a.ord
ON CONFLICT (name, key, shard) DO UPDATE SET (value, ts) = (
    SELECT
        CASE WHEN a.amount < 0 AND a.phase_us + (coalesce($11::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) - a.phase_us) / a.step_us * a.step_us > a.until_us THEN b.value
            WHEN a.amount < 0 THEN least(greatest(a.capacity, b.value), b.value - a.amount)
            ELSE least(a.capacity, b.value + ((greatest(a.ts - b.ts, 0) + a.step_us - 1) / a.step_us)::float8 * a.rate / a.steps) - a.amount END,
        CASE WHEN b.ts > a.ts + a.tolerance_us AND b.ts > a.ts + (coalesce($11::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) - a.ts) / a.step_us * a.step_us + a.tolerance_us THEN a.ts WHEN a.amount < 0 THEN b.ts ELSE greatest(b.ts, a.ts) END
    FROM asked AS a WHERE a.name = b.name AND a.key = b.key AND a.shard = b.shard)
