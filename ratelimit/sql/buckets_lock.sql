-- Lock the buckets that buckets_take_alone.sql, which follows in the same transaction, decides on.
--
-- Parameters as in buckets_take.sql. Returns nothing.
--
-- Every row is locked in the order asked, those included that are not there yet: they are made, full, on
-- the way, so that no two calls can lock two rows in different orders. When a look through the snapshot
-- says that a bucket will refuse anyway, nothing is locked and nothing is written.
WITH asked AS MATERIALIZED (
    SELECT u.*, clock.now_us, u.phase_us + (clock.now_us - u.phase_us) / u.step_us * u.step_us AS ts
    FROM unnest((SELECT $1::text[]), $2::text[], $3::integer[], $4::float8[], $5::float8[], $6::float8[],
            $7::bigint[], $8::float8[], $9::bigint[], $10::float8[], $12::bigint[])
        WITH ORDINALITY AS u (name, key, shard, cost, capacity, rate, step_us, steps, phase_us, lowest, tolerance_us, ord),
        (SELECT coalesce($11::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us) AS clock
), seen AS MATERIALIZED (
    SELECT CASE WHEN b.ts IS NULL THEN a.capacity
            ELSE least(a.capacity, b.value + ((greatest(a.ts - b.ts, 0) + a.step_us - 1) / a.step_us)::float8 * a.rate / a.steps) END - a.cost >= a.lowest AS enough
    FROM asked AS a LEFT JOIN LATERAL (SELECT r.value, r.ts FROM ratelimit.buckets AS r WHERE r.name = a.name AND r.key = a.key AND r.shard = a.shard LIMIT 1) AS b ON true
)
INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts)
SELECT a.name, a.key, a.shard, a.capacity, a.ts
FROM asked AS a WHERE (SELECT bool_and(enough) FROM seen) ORDER BY a.ord
ON CONFLICT (name, key, shard) DO UPDATE SET value = b.value WHERE false
