-- Take from several buckets, all or nothing, in a statement that is its own transaction.
--
-- Parameters as in buckets_take.sql. Returns one row for each bucket, in the order asked: allowed, and
-- the bucket's value and ts, and now_us. When all are allowed, value and ts are those after the
-- decision; when any is refused, nothing is changed, and they are those found.
--
-- locked takes the row locks first, in the order asked, and reads the newest versions; state decides on
-- them, so take never finds one bucket empty after it has taken from another. The exception is a bucket
-- that had no row when the statement began and has one now: take leaves it alone, and the division by
-- zero undoes the statement (SQLSTATE 22012), which is then made again. At SERIALIZABLE these reads would take part in conflict detection,
-- which is why a caller's transaction uses buckets_take.sql.
WITH asked AS MATERIALIZED (
    SELECT u.*, clock.now_us, u.phase_us + (clock.now_us - u.phase_us) / u.step_us * u.step_us AS ts
    FROM unnest($1::text[], $2::text[], $3::integer[], $4::float8[], $5::float8[], $6::float8[],
            $7::bigint[], $8::float8[], $9::bigint[], $10::float8[], $12::bigint[])
        WITH ORDINALITY AS u (name, key, shard, cost, capacity, rate, step_us, steps, phase_us, lowest, tolerance_us, ord),
        (SELECT coalesce($11::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us) AS clock
), locked AS MATERIALIZED (
    SELECT a.ord, b.value, b.ts
    FROM asked AS a JOIN ratelimit.buckets AS b ON b.name = a.name AND b.key = a.key AND b.shard = a.shard
    ORDER BY a.ord
    FOR NO KEY UPDATE OF b
), state AS MATERIALIZED (
    SELECT a.*, b.ord IS NOT NULL AS found, b.value AS found_value, b.ts AS found_ts,
        CASE WHEN b.ord IS NULL THEN a.capacity
            ELSE least(a.capacity, b.value + ((greatest(a.ts - b.ts, 0) + a.step_us - 1) / a.step_us)::float8 * a.rate / a.steps) END - a.cost AS next_value,
        CASE WHEN b.ord IS NULL OR b.ts > a.ts + a.tolerance_us THEN a.ts ELSE greatest(b.ts, a.ts) END AS next_ts
    FROM asked AS a LEFT JOIN locked AS b ON b.ord = a.ord
), verdict AS MATERIALIZED (
    SELECT bool_and(s.next_value >= s.lowest) AS allowed, count(*) AS buckets FROM state AS s
), take AS (
    INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts)
    SELECT s.name, s.key, s.shard, s.next_value, s.next_ts
    FROM state AS s, verdict WHERE verdict.allowed ORDER BY s.ord
    ON CONFLICT (name, key, shard) DO UPDATE SET value = excluded.value, ts = excluded.ts
    WHERE EXISTS (SELECT FROM state AS s WHERE s.found AND s.name = b.name AND s.key = b.key AND s.shard = b.shard)
    RETURNING b.name
), taken AS MATERIALIZED (
    SELECT CASE WHEN v.allowed AND v.buckets <> (SELECT count(*) FROM take) THEN 1 / (v.buckets - v.buckets) ELSE 1 END AS all_or_nothing FROM verdict AS v
)
SELECT s.next_value >= s.lowest AS allowed,
    CASE WHEN v.allowed THEN s.next_value ELSE coalesce(s.found_value, s.capacity) END AS value,
    CASE WHEN v.allowed THEN s.next_ts ELSE coalesce(s.found_ts, s.ts) END AS ts,
    s.now_us
FROM state AS s, verdict AS v, taken
WHERE taken.all_or_nothing = 1
ORDER BY s.ord
