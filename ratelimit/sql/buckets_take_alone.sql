-- Take from several buckets, all or nothing, after buckets_lock.sql in a transaction of the two.
--
-- Parameters as in buckets_take.sql. Returns one row for each bucket, in the order asked: allowed, and
-- the bucket's value and ts, and now_us. When all are allowed, value and ts are those after the
-- decision; when any is refused, nothing is changed, and they are those found.
--
-- state reads and decides; take writes what was decided, to the rows that are as they were read. As they are
-- locked, that is all of them. They are not locked when buckets_lock.sql saw that one would refuse: should
-- that one have enough by now, and another caller be quicker at some other, then the division by zero
-- undoes the statement (SQLSTATE 22012), and both are made again. At SERIALIZABLE these reads would take
-- part in conflict detection, which is why a caller's transaction uses buckets_take.sql.
WITH asked AS MATERIALIZED (
    SELECT u.*, clock.now_us, u.phase_us + (clock.now_us - u.phase_us) / u.step_us * u.step_us AS ts
    FROM unnest((SELECT $1::text[]), $2::text[], $3::integer[], $4::float8[], $5::float8[], $6::float8[],
            $7::bigint[], $8::float8[], $9::bigint[], $10::float8[], $12::bigint[])
        WITH ORDINALITY AS u (name, key, shard, cost, capacity, rate, step_us, steps, phase_us, lowest, tolerance_us, ord),
        (SELECT coalesce($11::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us) AS clock
), state AS MATERIALIZED (
    SELECT a.*, b.value AS found_value, b.ts AS found_ts,
        CASE WHEN b.ts IS NULL THEN a.capacity
            ELSE least(a.capacity, b.value + ((greatest(a.ts - b.ts, 0) + a.step_us - 1) / a.step_us)::float8 * a.rate / a.steps) END - a.cost AS next_value,
        CASE WHEN b.ts IS NULL OR b.ts > a.ts + a.tolerance_us THEN a.ts ELSE greatest(b.ts, a.ts) END AS next_ts
    FROM asked AS a LEFT JOIN LATERAL (SELECT r.value, r.ts FROM ratelimit.buckets AS r WHERE r.name = a.name AND r.key = a.key AND r.shard = a.shard LIMIT 1) AS b ON true
), verdict AS MATERIALIZED (
    SELECT bool_and(s.next_value >= s.lowest) AS allowed, count(*) AS buckets FROM state AS s
), take AS (
    INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts)
    SELECT s.name, s.key, s.shard, s.next_value, s.next_ts
    FROM state AS s, verdict WHERE verdict.allowed ORDER BY s.ord
    ON CONFLICT (name, key, shard) DO UPDATE SET value = excluded.value, ts = excluded.ts
    WHERE EXISTS (SELECT FROM state AS s WHERE s.name = b.name AND s.key = b.key AND s.shard = b.shard AND s.found_value = b.value AND s.found_ts = b.ts)
    RETURNING b.name
), unmade AS ( -- the rows that buckets_lock.sql made in this transaction, for nothing
    DELETE FROM ratelimit.buckets AS d WHERE d.ctid = ANY (ARRAY(
            SELECT b.ctid
            FROM verdict AS v CROSS JOIN state AS s
                CROSS JOIN LATERAL (SELECT r.ctid, r.xmin FROM ratelimit.buckets AS r WHERE r.name = s.name AND r.key = s.key AND r.shard = s.shard LIMIT 1) AS b
            WHERE NOT v.allowed AND s.found_value = s.capacity AND b.xmin = pg_current_xact_id_if_assigned()::xid))
        AND (d.name, d.key, d.shard) IN (SELECT s.name, s.key, s.shard FROM state AS s)
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
