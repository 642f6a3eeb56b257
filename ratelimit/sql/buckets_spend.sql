-- Take from many buckets of one limit, each for itself, in a transaction of the statement's own, at READ
-- COMMITTED.
--
-- $1 name, $2 key[], $3 shard[], $4 cost[]   the buckets, distinct and sorted, which is the order of locking
-- $5 capacity, $6 rate, $7 step_us, $8 steps, $9 phase_us[], $10 as_of_us, $11 tolerance_us   as in
-- bucket_take.sql; nothing may be owed
--
-- Returns key, shard, allowed, value, ts and now_us: a row for each bucket that gave, and one for each that
-- a look through the snapshot shows to be short, with what it held. A bucket for which there is none was
-- changed between the look and the deed. It works as bucket_take_alone.sql does. What a bucket is asked for is
-- in excluded.value, as what is missing from a full one.
--
-- The sub-select hides the length of the array from the planner, which would else make a new plan for every
-- call. LIMIT 1 has each row looked up by itself: a join may be planned to read all rows of the limit while
-- nobody has analyzed the table.
WITH clock AS MATERIALIZED (
    SELECT coalesce($10::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us
), seen AS MATERIALIZED (
    SELECT a.key, a.shard, a.cost, a.ord, a.ts, b.value AS found_value, b.ts AS found_ts,
        b.ts IS NULL OR least($5::float8, b.value + ((greatest(a.ts - b.ts, 0) + $7::bigint - 1) / $7::bigint)::float8 * $6::float8 / $8::float8) - a.cost >= 0 AS enough
    FROM (
        SELECT u.key, u.shard, u.cost, u.ord, u.phase_us + (clock.now_us - u.phase_us) / $7::bigint * $7::bigint AS ts
        FROM clock, unnest((SELECT $2::text[]), $3::integer[], $4::float8[], $9::bigint[]) WITH ORDINALITY AS u (key, shard, cost, phase_us, ord)
    ) AS a LEFT JOIN LATERAL (SELECT r.value, r.ts FROM ratelimit.buckets AS r WHERE r.name = $1::text AND r.key = a.key AND r.shard = a.shard LIMIT 1) AS b ON true
), take AS (
    INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts)
    SELECT $1::text, s.key, s.shard, $5::float8 - s.cost, s.ts FROM seen AS s WHERE s.enough ORDER BY s.ord
    ON CONFLICT (name, key, shard) DO UPDATE SET
        value = least($5::float8, b.value + ((greatest(excluded.ts - b.ts, 0) + $7::bigint - 1) / $7::bigint)::float8 * $6::float8 / $8::float8) - ($5::float8 - excluded.value),
        ts = CASE WHEN b.ts > excluded.ts + $11::bigint THEN excluded.ts ELSE greatest(b.ts, excluded.ts) END
    WHERE least($5::float8, b.value + ((greatest(excluded.ts - b.ts, 0) + $7::bigint - 1) / $7::bigint)::float8 * $6::float8 / $8::float8) - ($5::float8 - excluded.value) >= 0
    RETURNING b.key, b.shard, b.value, b.ts
)
SELECT t.key, t.shard, true AS allowed, t.value, t.ts, clock.now_us FROM take AS t, clock
UNION ALL
SELECT s.key, s.shard, false, s.found_value, s.found_ts, clock.now_us FROM seen AS s, clock WHERE NOT s.enough
