-- Take from many buckets of one limit, each for itself, in a transaction of the statement's own, at READ COMMITTED.
--
-- $1 name, $2 key[], $3 shard[], $4 cost[]   the buckets, distinct and sorted; no cost is more than the capacity
-- $5 capacity, $6 rate, $7 step_us, $8 steps, $9 phase_us[], $10 as_of_us, $11 tolerance_us,
-- $12 since_us, $13 until_us   as in bucket_take.sql; nothing may be owed
--
-- Returns ord, allowed, value, ts, capacity and now_us: a row for each bucket that gave. Each other bucket with a row has one, too, with its
-- value in the statement's snapshot. If that would have been enough, another call was quicker. ord is the place of the bucket in
-- the arrays. Buckets without a row are left out if the terms do not hold now.
--
-- gave waits for a locked row at most 1 ms (SQLSTATE 55P03). Then nothing was taken from any bucket. That is shorter than
-- deadlock_timeout, so a deadlock by the order in which a plan locks rows does not last. gave does not touch a row that the
-- snapshot shows to be short, so that a refusal writes nothing and logs nothing. At READ COMMITTED it checks changed rows again.
-- The comparison without growth comes first because it is cheap.
--
-- made inserts the missing rows, which are full. If another call inserts one of them first, the statement fails, and nothing was
-- taken (SQLSTATE 23505). ON CONFLICT would cost every batch more than the failure costs a few.
--
-- The sub-select hides the length of the array from the planner, which otherwise plans every call again. The planner does not
-- know the LIMIT of gave, and estimates a tenth of the rows, which is one. So it looks that row up by the key, also in a
-- table that was never analyzed, or was small then. The name is a column for the same reason. It is compared with ANY, because with
-- = the planner may read the whole index in its order, which for a table of one row costs the same. OFFSET 0 computes the clock
-- once. LATERAL looks each row up by itself: a join may be planned to read all rows of the limit.
WITH clock AS MATERIALIZED (
    SELECT n.now_us, ($12::bigint IS NULL OR n.now_us BETWEEN $12::bigint AND $13::bigint) AS holds, set_config('lock_timeout', '1ms', true) AS bound/* durability */
    FROM (SELECT coalesce($10::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us OFFSET 0) AS n
), gave AS (
    UPDATE ratelimit.buckets AS b SET
        value = least($5::float8, b.value + ((greatest(a.ts - b.ts, 0) + $7::bigint - 1) / $7::bigint)::float8 * $6::float8 / $8::float8) - a.cost,
        ts = CASE WHEN b.ts > a.ts + $11::bigint AND b.ts > coalesce($10::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) + $11::bigint THEN a.ts ELSE greatest(b.ts, a.ts) END,
        capacity = CASE WHEN b.capacity = $5::float8 OR least($5::float8, b.value + ((greatest(a.ts - b.ts, 0) + $7::bigint - 1) / $7::bigint)::float8 * $6::float8 / $8::float8) >= $5::float8 THEN $5::float8 ELSE b.capacity END
    FROM (
        SELECT $1::text AS name, u.key, u.shard, u.cost, u.ord, greatest(u.phase_us + (clock.now_us - u.phase_us) / $7::bigint * $7::bigint, $12::bigint) AS ts
        FROM clock, unnest((SELECT $2::text[]), $3::integer[], $4::float8[], $9::bigint[]) WITH ORDINALITY AS u (key, shard, cost, phase_us, ord)
        WHERE clock.holds AND clock.bound IS NOT NULL
        LIMIT (SELECT cardinality($2::text[]))) AS a
    WHERE b.name = ANY (ARRAY[a.name]) AND b.key = a.key AND b.shard = a.shard
        AND (b.value >= a.cost OR least($5::float8, b.value + ((greatest(a.ts - b.ts, 0) + $7::bigint - 1) / $7::bigint)::float8 * $6::float8 / $8::float8) - a.cost >= 0)
        AND ($12::bigint IS NULL OR b.ts BETWEEN $12::bigint AND $13::bigint) AND (b.capacity = $5::float8 OR $7::bigint = 1)
    RETURNING a.ord, b.value, b.ts, b.capacity
), rest AS MATERIALIZED (
    SELECT a.key, a.shard, a.ord, b.ts IS NULL AS missing,
        coalesce(b.value, $5::float8 - a.cost) AS value, coalesce(b.ts, greatest(a.phase_us + (c.now_us - a.phase_us) / $7::bigint * $7::bigint, $12::bigint)) AS ts, coalesce(b.capacity, $5::float8) AS capacity
    FROM unnest((SELECT $2::text[]), $3::integer[], $4::float8[], $9::bigint[]) WITH ORDINALITY AS a (key, shard, cost, phase_us, ord)
    CROSS JOIN clock AS c
    LEFT JOIN LATERAL (
        SELECT r.value, r.ts, r.capacity FROM ratelimit.buckets AS r WHERE r.name = $1::text AND r.key = a.key AND r.shard = a.shard LIMIT 1) AS b ON true
    WHERE (SELECT count(*) FROM gave) < (SELECT cardinality($2::text[])) AND a.ord NOT IN (SELECT g.ord FROM gave AS g)
        AND (c.holds OR b.ts IS NOT NULL)
), made AS (
    INSERT INTO ratelimit.buckets (name, key, shard, value, ts, capacity)
    SELECT $1::text, r.key, r.shard, r.value, r.ts, r.capacity FROM rest AS r WHERE r.missing
)
SELECT g.ord, true AS allowed, g.value, g.ts, g.capacity, (SELECT c.now_us FROM clock AS c) AS now_us FROM gave AS g
UNION ALL
SELECT r.ord, r.missing, r.value, r.ts, r.capacity, (SELECT c.now_us FROM clock AS c) FROM rest AS r
