-- Take from the buckets of clusters, for each cluster all or nothing, in a transaction of the statement's own, at READ COMMITTED.
-- It does not wait for a locked row, because meanwhile it would hold others.
--
-- $1 name[], $2 key[], $3 shard[]     the buckets, distinct and sorted
-- $4 cost[], $5 capacity[], $6 rate[], $7 step_us[], $8 steps[], $9 phase_us[], $10 lowest[]   as in bucket_take.sql
-- $11 cluster[]                       which of them go together
-- $12 as_of_us, $13 tolerance_us[], $14 since_us[], $15 until_us[]   as in bucket_take.sql
--
-- Returns one row for each bucket, in the order asked: given, enough, absent, value, ts, capacity and now_us. If its cluster was
-- given, the last three are as of after the decision. Otherwise they are as found, and enough is whether the value suffices. A cluster is not
-- given if one of its buckets has too little or other terms, or if another transaction holds a row or was quicker.
--
-- seen reads the snapshot. If a cluster has too little there, nothing of it is locked or written. locked locks the free rows of the
-- other clusters in the version that seen read: each still has its TID unless another transaction was quicker. So take finds each
-- row by its TID, and writes the result computed from seen.
-- made inserts the missing rows, which are full. It waits at most 2 ms for a row that another transaction inserts (SQLSTATE 55P03).
-- If another call inserted one first, the division by zero undoes the statement (SQLSTATE 22012). At other isolation levels the
-- statement is exact too, and fails if another call was quicker.
--
-- LATERAL, LIMIT 1 and the first sub-select are as in buckets_spend.sql. The planner estimates an unknown LIMIT as a tenth of its
-- input, which is one row here: so take finds each by its TID, with or without statistics of the table.
WITH clock AS MATERIALIZED (
    SELECT coalesce($12::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us/* durability */
), seen AS MATERIALIZED (
    SELECT a.ord, a.cluster, a.name, a.key, a.shard, a.lowest, b.tid, b.value, b.ts, b.capacity,
        least(a.capacity, b.value + ((greatest(a.begun - b.ts, 0) + a.step_us - 1) / a.step_us)::float8 * a.rate / a.steps) - a.cost AS next_value,
        CASE WHEN b.ts > a.begun + a.tolerance_us AND b.ts > coalesce($12::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) + a.tolerance_us THEN a.begun ELSE greatest(b.ts, a.begun) END AS next_ts,
        CASE WHEN b.capacity = a.capacity OR least(a.capacity, b.value + ((greatest(a.begun - b.ts, 0) + a.step_us - 1) / a.step_us)::float8 * a.rate / a.steps) >= a.capacity THEN a.capacity ELSE b.capacity END AS next_capacity,
        a.holds AND (b.tid IS NULL OR (a.since_us IS NULL OR b.ts BETWEEN a.since_us AND a.until_us) AND (b.capacity = a.capacity OR a.step_us = 1)) AS fits
    FROM (
        SELECT u.*, greatest(u.phase_us + (clock.now_us - u.phase_us) / u.step_us * u.step_us, u.since_us) AS begun, (u.since_us IS NULL OR clock.now_us BETWEEN u.since_us AND u.until_us) AS holds
        FROM clock, unnest((SELECT $1::text[]), $2::text[], $3::integer[], $4::float8[], $5::float8[], $6::float8[],
                $7::bigint[], $8::float8[], $9::bigint[], $10::float8[], $11::integer[], $13::bigint[], $14::bigint[], $15::bigint[])
            WITH ORDINALITY AS u (name, key, shard, cost, capacity, rate, step_us, steps, phase_us, lowest, cluster, tolerance_us, since_us, until_us, ord)
        OFFSET 0) AS a
    LEFT JOIN LATERAL (
        SELECT r.ctid AS tid, r.value, r.ts, r.capacity FROM ratelimit.buckets AS r
        WHERE r.name = a.name AND r.key = a.key AND r.shard = a.shard LIMIT 1) AS b ON true
), short AS MATERIALIZED (
    SELECT s.cluster FROM seen AS s WHERE NOT (s.fits AND s.next_value >= s.lowest)
), locked AS MATERIALIZED (
    SELECT s.cluster, s.tid, s.next_value, s.next_ts, s.next_capacity, b.tid AS locked_tid
    FROM seen AS s LEFT JOIN LATERAL (
        SELECT r.ctid AS tid FROM ratelimit.buckets AS r WHERE r.ctid = s.tid
        FOR NO KEY UPDATE SKIP LOCKED) AS b ON true
    WHERE s.cluster NOT IN (SELECT n.cluster FROM short AS n) AND s.tid IS NOT NULL
), busy AS MATERIALIZED (
    SELECT l.cluster FROM locked AS l WHERE l.locked_tid IS DISTINCT FROM l.tid
), take AS (
    UPDATE ratelimit.buckets AS b SET value = l.next_value, ts = l.next_ts, capacity = l.next_capacity
    FROM (
        SELECT n.tid, n.next_value, n.next_ts, n.next_capacity FROM locked AS n
        WHERE n.cluster NOT IN (SELECT o.cluster FROM busy AS o)
        LIMIT (SELECT cardinality($2::text[]))) AS l
    WHERE b.ctid = l.tid
), missing AS MATERIALIZED (
    SELECT s.name, s.key, s.shard, s.next_value, s.next_ts, s.next_capacity FROM seen AS s
    WHERE s.tid IS NULL AND s.cluster NOT IN (SELECT n.cluster FROM short AS n UNION ALL SELECT n.cluster FROM busy AS n)
), bound AS MATERIALIZED (
    SELECT set_config('lock_timeout', '2ms', true) FROM missing LIMIT 1
), made AS (
    INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity)
    SELECT m.name, m.key, m.shard, m.next_value, m.next_ts, m.next_capacity FROM bound, missing AS m
    ON CONFLICT (name, key, shard) DO NOTHING
    RETURNING b.shard
), taken AS MATERIALIZED (
    SELECT 1 / (CASE WHEN m.n = (SELECT count(*) FROM made) THEN 1 ELSE m.n - m.n END) AS all_or_nothing
    FROM (SELECT count(*) AS n FROM missing) AS m
)
SELECT d.given, d.enough, d.absent,
    CASE WHEN d.given THEN d.next_value ELSE d.value END AS value,
    CASE WHEN d.given THEN d.next_ts ELSE d.ts END AS ts,
    CASE WHEN d.given THEN d.next_capacity ELSE d.capacity END AS capacity,
    clock.now_us
FROM (
    SELECT s.cluster NOT IN (SELECT n.cluster FROM short AS n UNION ALL SELECT n.cluster FROM busy AS n) AS given,
        s.fits AND s.next_value >= s.lowest AS enough, s.ts IS NULL AS absent, s.next_value, s.next_ts, s.next_capacity,
        coalesce(s.value, 0) AS value, coalesce(s.ts, 0) AS ts, coalesce(s.capacity, 0) AS capacity, s.ord
    FROM seen AS s
    OFFSET 0) AS d, clock, taken
WHERE taken.all_or_nothing = 1
ORDER BY d.ord
