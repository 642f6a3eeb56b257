-- Take from several buckets, all or nothing, in a transaction of the statement's own, at READ COMMITTED. It waits
-- for no row that somebody holds, because meanwhile it would hold others.
--
-- Parameters as in buckets_take.sql. Returns one row for each bucket, in the order asked: allowed, the bucket's
-- value and ts, now_us, and held. When all are allowed, value and ts are those after the decision; when any is
-- refused, or somebody holds the row of any, nothing is changed, and they are those found.
--
-- seen looks through the snapshot: where that shows a bucket to be short, nothing is locked and nothing is
-- written. Else locked takes the rows that are free, and state decides on their newest version. take writes
-- them, and made adds those that are not there, as in buckets_spend.sql. Where somebody else was quicker to make
-- one, the division by zero undoes the statement (SQLSTATE 22012), and it is made again. At SERIALIZABLE these
-- reads would take part in conflict detection, which is why a caller's transaction uses buckets_take.sql.
WITH asked AS MATERIALIZED (
    SELECT u.*, clock.now_us, greatest(u.phase_us + (clock.now_us - u.phase_us) / u.step_us * u.step_us, u.since_us) AS ts, (u.since_us IS NULL OR clock.now_us BETWEEN u.since_us AND u.until_us) AS holds
    FROM unnest((SELECT $1::text[]), $2::text[], $3::integer[], $4::float8[], $5::float8[], $6::float8[],
            $7::bigint[], $8::float8[], $9::bigint[], $10::float8[], $12::bigint[], $13::bigint[], $14::bigint[])
        WITH ORDINALITY AS u (name, key, shard, cost, capacity, rate, step_us, steps, phase_us, lowest, tolerance_us, since_us, until_us, ord),
        (SELECT coalesce($11::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us) AS clock
), seen AS MATERIALIZED (
    SELECT a.ord, b.value, b.ts,
        CASE WHEN b.ts IS NULL THEN a.capacity
            ELSE least(a.capacity, b.value + ((greatest(a.ts - b.ts, 0) + a.step_us - 1) / a.step_us)::float8 * a.rate / a.steps) END - a.cost >= a.lowest
            AND a.holds AND (b.ts IS NULL OR (a.since_us IS NULL OR b.ts BETWEEN a.since_us AND a.until_us)) AS enough
    FROM asked AS a LEFT JOIN LATERAL (SELECT r.value, r.ts FROM ratelimit.buckets AS r WHERE r.name = a.name AND r.key = a.key AND r.shard = a.shard LIMIT 1) AS b ON true
), likely AS MATERIALIZED (
    SELECT bool_and(s.enough) AS allowed FROM seen AS s
), locked AS MATERIALIZED (
    SELECT a.ord, b.value, b.ts
    FROM asked AS a CROSS JOIN LATERAL (
        SELECT r.value, r.ts FROM ratelimit.buckets AS r WHERE r.name = a.name AND r.key = a.key AND r.shard = a.shard
        FOR NO KEY UPDATE SKIP LOCKED) AS b
    WHERE (SELECT v.allowed FROM likely AS v)
), state AS MATERIALIZED (
    SELECT a.*, s.ts IS NULL AS missing, v.allowed AND s.ts IS NOT NULL AND b.ts IS NULL AS held,
        coalesce(b.value, s.value, a.capacity) AS found_value, coalesce(b.ts, s.ts, a.ts) AS found_ts
    FROM likely AS v CROSS JOIN asked AS a JOIN seen AS s ON s.ord = a.ord LEFT JOIN locked AS b ON b.ord = a.ord
), next AS MATERIALIZED (
    SELECT s.*, least(s.capacity, s.found_value + ((greatest(s.ts - s.found_ts, 0) + s.step_us - 1) / s.step_us)::float8 * s.rate / s.steps) - s.cost AS next_value,
        CASE WHEN s.found_ts > s.ts + s.tolerance_us AND s.found_ts > s.ts + (coalesce($11::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) - s.ts) / s.step_us * s.step_us + s.tolerance_us THEN s.ts ELSE greatest(s.found_ts, s.ts) END AS next_ts,
        s.holds AND (s.missing OR (s.since_us IS NULL OR s.found_ts BETWEEN s.since_us AND s.until_us)) AS fits
    FROM state AS s
), verdict AS MATERIALIZED (
    SELECT bool_and(n.next_value >= n.lowest AND NOT n.held AND n.fits) AS allowed, count(*) FILTER (WHERE n.missing) AS missing FROM next AS n
), take AS (
    INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts)
    SELECT n.name, n.key, n.shard, n.next_value, n.next_ts
    FROM next AS n, verdict AS v WHERE v.allowed AND NOT n.missing ORDER BY n.ord
    ON CONFLICT (name, key, shard) DO UPDATE SET value = excluded.value, ts = excluded.ts
), bound AS MATERIALIZED (
    SELECT set_config('lock_timeout', '2ms', true) FROM verdict AS v WHERE v.allowed AND v.missing > 0
), made AS (
    INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts)
    SELECT n.name, n.key, n.shard, n.next_value, n.next_ts FROM bound, next AS n WHERE n.missing ORDER BY n.ord
    ON CONFLICT (name, key, shard) DO NOTHING
    RETURNING b.name
), taken AS MATERIALIZED (
    SELECT CASE WHEN v.allowed AND v.missing <> (SELECT count(*) FROM made) THEN 1 / (v.missing - v.missing) ELSE 1 END AS all_or_nothing FROM verdict AS v
)
SELECT n.next_value >= n.lowest AND NOT n.held AND n.fits AS allowed,
    CASE WHEN v.allowed THEN n.next_value ELSE n.found_value END AS value,
    CASE WHEN v.allowed THEN n.next_ts ELSE n.found_ts END AS ts,
    n.now_us, n.held
FROM next AS n, verdict AS v, taken
WHERE taken.all_or_nothing = 1
ORDER BY n.ord
