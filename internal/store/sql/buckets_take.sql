-- Take from several buckets inside the caller's transaction, at any isolation level. Behind a
-- savepoint: when any row of the answer is refused, the caller rolls back to it, so that all or
-- nothing is taken.
--
-- $1 name[], $2 key[], $3 shard[]     the buckets, distinct and sorted, which is the order of locking
-- $4 cost[], $5 capacity[], $6 rate[], $7 step_us[], $8 steps[], $9 phase_us[], $10 lowest[]
-- $11 as_of_us, $12 tolerance_us[], $13 since_us[], $14 until_us[]   all as in bucket_take.sql
--
-- Returns one row for each bucket, in the order asked: allowed, value, ts and capacity after the decision, now_us.
-- take and refused are the two of bucket_take.sql; the terms of each bucket come from asked.
WITH asked AS MATERIALIZED (
    SELECT u.*, clock.now_us, greatest(u.phase_us + (clock.now_us - u.phase_us) / u.step_us * u.step_us, u.since_us) AS ts, (u.since_us IS NULL OR clock.now_us BETWEEN u.since_us AND u.until_us) AS holds
    FROM unnest((SELECT $1::text[]), $2::text[], $3::integer[], $4::float8[], $5::float8[], $6::float8[],
            $7::bigint[], $8::float8[], $9::bigint[], $10::float8[], $12::bigint[], $13::bigint[], $14::bigint[])
        WITH ORDINALITY AS u (name, key, shard, cost, capacity, rate, step_us, steps, phase_us, lowest, tolerance_us, since_us, until_us, ord),
        (SELECT coalesce($11::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us) AS clock
), take AS (
    INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity)
    SELECT a.name, a.key, a.shard, a.capacity - a.cost, a.ts, a.capacity FROM asked AS a WHERE a.holds ORDER BY a.ord
    ON CONFLICT (name, key, shard) DO UPDATE SET (value, ts, capacity) = (
        SELECT
            least(a.capacity, b.value + ((greatest(excluded.ts - b.ts, 0) + a.step_us - 1) / a.step_us)::float8 * a.rate / a.steps) - a.cost,
            CASE WHEN b.ts > excluded.ts + a.tolerance_us AND b.ts > coalesce($11::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) + a.tolerance_us THEN excluded.ts ELSE greatest(b.ts, excluded.ts) END,
            CASE WHEN b.capacity = a.capacity OR least(a.capacity, b.value + ((greatest(excluded.ts - b.ts, 0) + a.step_us - 1) / a.step_us)::float8 * a.rate / a.steps) >= a.capacity THEN a.capacity ELSE b.capacity END
        FROM asked AS a WHERE a.name = b.name AND a.key = b.key AND a.shard = b.shard)
    WHERE (
        SELECT least(a.capacity, b.value + ((greatest(excluded.ts - b.ts, 0) + a.step_us - 1) / a.step_us)::float8 * a.rate / a.steps) - a.cost >= a.lowest AND (a.since_us IS NULL OR b.ts BETWEEN a.since_us AND a.until_us) AND (b.capacity = a.capacity OR a.step_us = 1)
        FROM asked AS a WHERE a.name = b.name AND a.key = b.key AND a.shard = b.shard)
    RETURNING b.name, b.key, b.shard, b.value, b.ts, b.capacity
), refused AS (
    INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity)
    SELECT a.name, a.key, a.shard, 0, 0, 0 FROM asked AS a
    WHERE NOT EXISTS (SELECT FROM take AS t WHERE t.name = a.name AND t.key = a.key AND t.shard = a.shard) AND a.holds
    ORDER BY a.ord
    ON CONFLICT (name, key, shard) DO UPDATE SET value = b.value
    RETURNING b.name, b.key, b.shard, b.value, b.ts, b.capacity
)
SELECT t.name IS NOT NULL AS allowed, coalesce(t.value, r.value, 0) AS value, coalesce(t.ts, r.ts, 0) AS ts,
    coalesce(t.capacity, r.capacity, 0) AS capacity, a.now_us
FROM asked AS a
LEFT JOIN take AS t ON t.name = a.name AND t.key = a.key AND t.shard = a.shard
LEFT JOIN refused AS r ON r.name = a.name AND r.key = a.key AND r.shard = a.shard
ORDER BY a.ord
