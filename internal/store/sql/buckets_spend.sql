-- Take from many buckets of one limit, each for itself, in a transaction of the statement's own, at READ
-- COMMITTED. It waits for no row that somebody holds, because meanwhile it would hold others.
--
-- $1 name, $2 key[], $3 shard[], $4 cost[]   the buckets, distinct and sorted
-- $5 capacity, $6 rate, $7 step_us, $8 steps, $9 phase_us[], $10 as_of_us, $11 tolerance_us,
-- $12 since_us, $13 until_us   as in bucket_take.sql; nothing may be owed
--
-- Returns key, shard, allowed, value, ts and now_us: a row for each bucket that gave, and one for each other, with
-- what it held in the statement's snapshot. Where that would have been enough, somebody holds the row, or was
-- quicker. A bucket for which there is none is being made by somebody.
--
-- locked locks the rows that are free and have enough, by their newest version. It does not lock a row that the
-- snapshot shows to be short, so that a refusal writes nothing and logs nothing. take changes the locked rows, and
-- adds those that are not there, which are full. What a bucket is asked for is in excluded.value, as what is missing
-- from a full one. Where somebody else is making a row, take waits for that one, which SKIP LOCKED cannot prevent,
-- but for 2 ms at most (SQLSTATE 55P03).
--
-- The sub-select hides the length of the array from the planner, which would else make a new plan for every
-- call. LATERAL has each row looked up by itself: a join may be planned to read all rows of the limit while
-- nobody has analyzed the table. For the same reason take is an upsert for the rows that are there, too.
WITH clock AS MATERIALIZED (
    SELECT coalesce($10::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us, ($12::bigint IS NULL OR coalesce($10::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) BETWEEN $12::bigint AND $13::bigint) AS holds
), asked AS MATERIALIZED (
    SELECT u.key, u.shard, u.cost, u.ord, greatest(u.phase_us + (clock.now_us - u.phase_us) / $7::bigint * $7::bigint, $12::bigint) AS ts
    FROM clock, unnest((SELECT $2::text[]), $3::integer[], $4::float8[], $9::bigint[]) WITH ORDINALITY AS u (key, shard, cost, phase_us, ord)
), locked AS MATERIALIZED (
    SELECT a.key, a.shard, a.cost, a.ord, a.ts
    FROM asked AS a CROSS JOIN LATERAL (
        SELECT FROM ratelimit.buckets AS r
        WHERE r.name = $1::text AND r.key = a.key AND r.shard = a.shard
            AND least($5::float8, r.value + ((greatest(a.ts - r.ts, 0) + $7::bigint - 1) / $7::bigint)::float8 * $6::float8 / $8::float8) - a.cost >= 0 AND ($12::bigint IS NULL OR r.ts BETWEEN $12::bigint AND $13::bigint)
        FOR NO KEY UPDATE SKIP LOCKED) AS b
    WHERE (SELECT c.holds FROM clock AS c)
), rest AS MATERIALIZED (
    SELECT a.key, a.shard, a.cost, a.ord, a.ts AS begun, b.value, b.ts
    FROM asked AS a LEFT JOIN LATERAL (SELECT r.value, r.ts FROM ratelimit.buckets AS r WHERE r.name = $1::text AND r.key = a.key AND r.shard = a.shard LIMIT 1) AS b ON true
    WHERE (SELECT count(*) FROM locked) < (SELECT cardinality($2::text[])) AND NOT EXISTS (SELECT FROM locked AS l WHERE l.ord = a.ord)
), bound AS MATERIALIZED (
    SELECT set_config('lock_timeout', '2ms', true) FROM rest AS r, clock AS c WHERE r.ts IS NULL AND c.holds LIMIT 1
), take AS (
    INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts)
    SELECT $1::text, l.key, l.shard, $5::float8 - l.cost, l.ts FROM locked AS l
    UNION ALL
    (SELECT $1::text, r.key, r.shard, $5::float8 - r.cost, r.begun FROM bound, rest AS r WHERE r.ts IS NULL ORDER BY r.ord)
    ON CONFLICT (name, key, shard) DO UPDATE SET
        value = least($5::float8, b.value + ((greatest(excluded.ts - b.ts, 0) + $7::bigint - 1) / $7::bigint)::float8 * $6::float8 / $8::float8) - ($5::float8 - excluded.value),
        ts = CASE WHEN b.ts > excluded.ts + $11::bigint AND b.ts > excluded.ts + (coalesce($10::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) - excluded.ts) / $7::bigint * $7::bigint + $11::bigint THEN excluded.ts ELSE greatest(b.ts, excluded.ts) END
    WHERE least($5::float8, b.value + ((greatest(excluded.ts - b.ts, 0) + $7::bigint - 1) / $7::bigint)::float8 * $6::float8 / $8::float8) - ($5::float8 - excluded.value) >= 0
        AND ($12::bigint IS NULL OR b.ts BETWEEN $12::bigint AND $13::bigint)
    RETURNING b.key, b.shard, b.value, b.ts
)
SELECT t.key, t.shard, true AS allowed, t.value, t.ts, clock.now_us FROM take AS t, clock
UNION ALL
SELECT r.key, r.shard, false, coalesce(r.value, 0), coalesce(r.ts, 0), clock.now_us FROM rest AS r, clock WHERE r.ts IS NOT NULL OR NOT clock.holds
