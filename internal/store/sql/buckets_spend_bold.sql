-- Take from many buckets of one limit as buckets_spend.sql does, at two thirds of its cost, where nearly all of them
-- have a row that nobody holds. Whoever sends it is ready to send buckets_spend.sql behind it.
--
-- The parameters are those of buckets_spend.sql, where no cost is more than the capacity.
--
-- Returns ord, allowed, value, ts and now_us: a row for each bucket that gave, and one for each other that has a row,
-- with what that held in the statement's snapshot. Where that would have been enough, somebody was quicker. ord is the
-- place of the bucket in the arrays. A bucket for which there is none has no row, and buckets_spend.sql makes it.
--
-- gave waits for a row that somebody holds, but for 1 ms at most (SQLSTATE 55P03): then nothing was taken from any
-- bucket. That is shorter than deadlock_timeout, so the order in which a plan locks rows makes no circle that lasts. gave does
-- not touch a row that the snapshot shows to be short, so that a refusal writes nothing and logs nothing; at READ
-- COMMITTED it looks again at what changed meanwhile. What is enough without what has grown is compared without it.
--
-- The sub-select hides the length of the array from the planner, which would else make a new plan for every call. LIMIT
-- leaves nothing out: the planner does not know it, takes it for a tenth of the rows, which is one, and looks that up by
-- the key, also while nobody has analyzed the table. The name is a column for that, too: as a parameter it alone finds no more rows than
-- the key, for what such a planner knows. OFFSET 0 has the clock worked out once.
WITH clock AS MATERIALIZED (
    SELECT n.now_us, ($12::bigint IS NULL OR n.now_us BETWEEN $12::bigint AND $13::bigint) AS holds, set_config('lock_timeout', '1ms', true) AS bound
    FROM (SELECT coalesce($10::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us OFFSET 0) AS n
), gave AS (
    UPDATE ratelimit.buckets AS b SET
        value = least($5::float8, b.value + ((greatest(a.ts - b.ts, 0) + $7::bigint - 1) / $7::bigint)::float8 * $6::float8 / $8::float8) - a.cost,
        ts = CASE WHEN b.ts > a.ts + $11::bigint AND b.ts > a.ts + (coalesce($10::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) - a.ts) / $7::bigint * $7::bigint + $11::bigint THEN a.ts ELSE greatest(b.ts, a.ts) END
    FROM (
        SELECT $1::text AS name, u.key, u.shard, u.cost, u.ord, greatest(u.phase_us + (clock.now_us - u.phase_us) / $7::bigint * $7::bigint, $12::bigint) AS ts
        FROM clock, unnest((SELECT $2::text[]), $3::integer[], $4::float8[], $9::bigint[]) WITH ORDINALITY AS u (key, shard, cost, phase_us, ord)
        WHERE clock.holds AND clock.bound IS NOT NULL
        LIMIT (SELECT cardinality($2::text[]))) AS a
    WHERE b.name = a.name AND b.key = a.key AND b.shard = a.shard
        AND (b.value >= a.cost OR least($5::float8, b.value + ((greatest(a.ts - b.ts, 0) + $7::bigint - 1) / $7::bigint)::float8 * $6::float8 / $8::float8) - a.cost >= 0)
        AND ($12::bigint IS NULL OR b.ts BETWEEN $12::bigint AND $13::bigint)
    RETURNING a.ord, b.value, b.ts
)
SELECT g.ord, true AS allowed, g.value, g.ts, (SELECT c.now_us FROM clock AS c) AS now_us FROM gave AS g
UNION ALL
SELECT a.ord, false, b.value, b.ts, (SELECT c.now_us FROM clock AS c)
FROM unnest((SELECT $2::text[]), $3::integer[]) WITH ORDINALITY AS a (key, shard, ord) CROSS JOIN LATERAL (
    SELECT r.value, r.ts FROM ratelimit.buckets AS r WHERE r.name = $1::text AND r.key = a.key AND r.shard = a.shard LIMIT 1) AS b
WHERE (SELECT count(*) FROM gave) < (SELECT cardinality($2::text[])) AND a.ord NOT IN (SELECT g.ord FROM gave AS g)
