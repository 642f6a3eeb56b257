-- Take from many buckets of one limit, each for itself, in a transaction of the statement's own, at READ
-- COMMITTED.
--
-- $1 name, $2 key[], $3 shard[], $4 cost[]   the buckets, distinct and sorted, which is the order of locking
-- $5 capacity, $6 rate, $7 step_us, $8 steps, $9 phase_us[], $10 as_of_us, $11 tolerance_us   as in
-- bucket_take.sql; nothing may be owed
--
-- Returns one row for each bucket, in the order asked: allowed, value and ts, now_us. When it is not
-- allowed, value and ts are those of the snapshot, and null when it had no row. It works as
-- bucket_take_alone.sql does. What a bucket is asked for is in excluded.value, as the row of a full bucket.
-- LIMIT 1 has each row looked up by itself: a join may be planned to read all rows of the limit while nobody
-- has analyzed the table.
WITH seen AS MATERIALIZED (
    SELECT u.key, u.shard, u.cost, u.ord, clock.now_us, b.value AS found_value, b.ts AS found_ts,
        u.phase_us + (clock.now_us - u.phase_us) / $7::bigint * $7::bigint AS ts
    FROM unnest($2::text[], $3::integer[], $4::float8[], $9::bigint[]) WITH ORDINALITY AS u (key, shard, cost, phase_us, ord)
    CROSS JOIN (SELECT coalesce($10::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us) AS clock
    LEFT JOIN LATERAL (SELECT r.value, r.ts FROM ratelimit.buckets AS r WHERE r.name = $1::text AND r.key = u.key AND r.shard = u.shard LIMIT 1) AS b ON true
), take AS (
    INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts)
    SELECT $1::text, s.key, s.shard, $5::float8 - s.cost, s.ts
    FROM seen AS s
    WHERE s.found_ts IS NULL
        OR least($5::float8, s.found_value + ((greatest(s.ts - s.found_ts, 0) + $7::bigint - 1) / $7::bigint)::float8 * $6::float8 / $8::float8) - s.cost >= 0
    ORDER BY s.ord
    ON CONFLICT (name, key, shard) DO UPDATE SET
        value = least($5::float8, b.value + ((greatest(excluded.ts - b.ts, 0) + $7::bigint - 1) / $7::bigint)::float8 * $6::float8 / $8::float8) - ($5::float8 - excluded.value),
        ts = CASE WHEN b.ts > excluded.ts + $11::bigint THEN excluded.ts ELSE greatest(b.ts, excluded.ts) END
    WHERE least($5::float8, b.value + ((greatest(excluded.ts - b.ts, 0) + $7::bigint - 1) / $7::bigint)::float8 * $6::float8 / $8::float8) - ($5::float8 - excluded.value) >= 0
    RETURNING b.key, b.shard, b.value, b.ts
)
SELECT t.ts IS NOT NULL AS allowed, coalesce(t.value, s.found_value) AS value, coalesce(t.ts, s.found_ts) AS ts, s.now_us
FROM seen AS s LEFT JOIN take AS t ON t.key = s.key AND t.shard = s.shard
ORDER BY s.ord
