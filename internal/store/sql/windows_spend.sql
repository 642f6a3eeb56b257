-- Take from many sliding windows of one limit, each for itself, in a transaction of the statement's own, at READ
-- COMMITTED. It waits for no row that somebody holds, because meanwhile it would hold others.
--
-- $1 name, $2 key[], $3 shard[], $4 cost[]   the buckets, distinct and sorted
-- $5 capacity, $6 step_us, $7 period_us, $8 phase_us, $9 as_of_us, $10 tolerance_us, $11 since_us, $12 until_us   as in
-- window_take.sql; nothing may be owed
--
-- Returns key, shard, allowed, value, ts, now_us and taken, as buckets_spend.sql does, whose parts these are. What a
-- bucket is asked for is in excluded.taken. A row that is not as these terms leave it is not locked.
WITH clock AS MATERIALIZED (
    SELECT coalesce($9::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us, ($11::bigint IS NULL OR coalesce($9::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) BETWEEN $11::bigint AND $12::bigint) AS holds
), asked AS MATERIALIZED (
    SELECT u.key, u.shard, u.cost, u.ord, greatest($8::bigint + (clock.now_us - $8::bigint) / $6::bigint * $6::bigint, $11::bigint) AS ts
    FROM clock, unnest((SELECT $2::text[]), $3::integer[], $4::float8[]) WITH ORDINALITY AS u (key, shard, cost, ord)
), locked AS MATERIALIZED (
    SELECT a.key, a.shard, a.cost, a.ord, a.ts
    FROM asked AS a CROSS JOIN LATERAL (
        SELECT FROM ratelimit.buckets AS r
        WHERE r.name = $1::text AND r.key = a.key AND r.shard = a.shard AND r.taken[1] = $6::bigint AND r.taken[2] = r.value AND r.taken[3] <= 64 * $5::float8
        AND NOT r.ts > a.ts + $10::bigint AND ($11::bigint IS NULL OR r.ts BETWEEN $11::bigint AND $12::bigint)
        AND $5::float8 - CASE WHEN a.ts - $7::bigint > r.ts THEN a.cost
            ELSE r.taken[3] + a.cost - r.taken[least((($7::bigint - greatest(a.ts - r.ts, 0)) / $6::bigint + 4)::integer, cardinality(r.taken))] END >= 0
        FOR NO KEY UPDATE SKIP LOCKED) AS b
    WHERE (SELECT c.holds FROM clock AS c)
), rest AS MATERIALIZED (
    SELECT a.key, a.shard, a.cost, a.ord, a.ts AS begun, b.value, b.ts, b.taken
    FROM asked AS a LEFT JOIN LATERAL (SELECT r.value, r.ts, r.taken FROM ratelimit.buckets AS r WHERE r.name = $1::text AND r.key = a.key AND r.shard = a.shard LIMIT 1) AS b ON true
    WHERE (SELECT count(*) FROM locked) < (SELECT cardinality($2::text[])) AND NOT EXISTS (SELECT FROM locked AS l WHERE l.ord = a.ord)
), bound AS MATERIALIZED (
    SELECT set_config('lock_timeout', '2ms', true) FROM rest AS r, clock AS c WHERE r.ts IS NULL AND c.holds LIMIT 1
), take AS (
    INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, taken)
    SELECT $1::text, l.key, l.shard, $5::float8 - l.cost, l.ts, ARRAY[$6::bigint, $5::float8 - l.cost, l.cost, 0] FROM locked AS l
    UNION ALL
    (SELECT $1::text, r.key, r.shard, $5::float8 - r.cost, r.begun, ARRAY[$6::bigint, $5::float8 - r.cost, r.cost, 0]
        FROM bound, rest AS r WHERE r.ts IS NULL ORDER BY r.ord)
    ON CONFLICT (name, key, shard) DO UPDATE SET
        value = CASE WHEN excluded.ts - $7::bigint > b.ts THEN excluded.value
            ELSE $5::float8 - (b.taken[3] + excluded.taken[3] - b.taken[least((($7::bigint - greatest(excluded.ts - b.ts, 0)) / $6::bigint + 4)::integer, cardinality(b.taken))]) END,
        ts = greatest(b.ts, excluded.ts),
        taken = CASE WHEN excluded.ts - $7::bigint > b.ts THEN excluded.taken
            ELSE ARRAY[$6::bigint, $5::float8 - (b.taken[3] + excluded.taken[3] - b.taken[least((($7::bigint - greatest(excluded.ts - b.ts, 0)) / $6::bigint + 4)::integer, cardinality(b.taken))]), b.taken[3] + excluded.taken[3]]
                || array_fill(b.taken[3], ARRAY[((greatest(excluded.ts - b.ts, 0) + $6::bigint - 1) / $6::bigint)::integer])
                || b.taken[4:CASE WHEN cardinality(b.taken) > (($7::bigint - greatest(excluded.ts - b.ts, 0)) / $6::bigint + 4)::integer + 44 THEN (($7::bigint - greatest(excluded.ts - b.ts, 0)) / $6::bigint + 4)::integer ELSE cardinality(b.taken) END] END
    WHERE b.taken[1] = $6::bigint AND b.taken[2] = b.value AND b.taken[3] <= 64 * $5::float8
        AND NOT b.ts > excluded.ts + $10::bigint AND ($11::bigint IS NULL OR b.ts BETWEEN $11::bigint AND $12::bigint)
        AND $5::float8 - CASE WHEN excluded.ts - $7::bigint > b.ts THEN excluded.taken[3]
            ELSE b.taken[3] + excluded.taken[3] - b.taken[least((($7::bigint - greatest(excluded.ts - b.ts, 0)) / $6::bigint + 4)::integer, cardinality(b.taken))] END >= 0
    RETURNING b.key, b.shard, b.value, b.ts, b.taken
)
SELECT t.key, t.shard, true AS allowed, t.value, t.ts, clock.now_us, t.taken FROM take AS t, clock
UNION ALL
SELECT r.key, r.shard, false, coalesce(r.value, 0), coalesce(r.ts, 0), clock.now_us, r.taken FROM rest AS r, clock WHERE r.ts IS NOT NULL OR NOT clock.holds
