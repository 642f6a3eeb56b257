-- Lock the free ones of the rows to the end of the transaction, at READ COMMITTED, and return their columns. It does not wait for a
-- locked row, because meanwhile it would hold others.
--
-- Parameters as in buckets_lock.sql. Returns name, key, shard, value, ts, capacity, taken, leases, now_us and made for each row that it has
-- locked. Missing rows are inserted full, because a missing row is a full bucket; made marks them. The wait for a row that another
-- transaction is inserting ends after 2 ms (SQLSTATE 55P03).
WITH asked AS MATERIALIZED (
    SELECT u.*, clock.now_us, u.phase_us + (clock.now_us - u.phase_us) / u.step_us * u.step_us AS begun
    FROM unnest((SELECT $1::text[]), $2::text[], $3::integer[], $4::float8[], $5::bigint[], $6::bigint[])
            WITH ORDINALITY AS u (name, key, shard, capacity, step_us, phase_us, ord),
        (SELECT coalesce($7::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us) AS clock
), locked AS MATERIALIZED (
    SELECT a.name, a.key, a.shard, a.ord, a.now_us, b.value, b.ts, b.capacity, b.taken, b.leased
    FROM asked AS a CROSS JOIN LATERAL (
        SELECT r.value, r.ts, r.capacity, r.taken, r.leased FROM ratelimit.buckets AS r WHERE r.name = a.name AND r.key = a.key AND r.shard = a.shard
        FOR NO KEY UPDATE SKIP LOCKED) AS b
), missing AS MATERIALIZED (
    SELECT a.* FROM asked AS a
    WHERE NOT EXISTS (SELECT FROM locked AS l WHERE l.ord = a.ord)
        AND (SELECT r.ts FROM ratelimit.buckets AS r WHERE r.name = a.name AND r.key = a.key AND r.shard = a.shard LIMIT 1) IS NULL
), bound AS MATERIALIZED (
    SELECT set_config('lock_timeout', '2ms', true) FROM missing LIMIT 1
), made AS (
    INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity)
    SELECT m.name, m.key, m.shard, m.capacity, m.begun, m.capacity FROM bound, missing AS m ORDER BY m.ord
    ON CONFLICT (name, key, shard) DO NOTHING
    RETURNING b.name, b.key, b.shard, b.value, b.ts, b.capacity
)
SELECT l.name, l.key, l.shard, l.value, l.ts, l.capacity, l.taken, l.leased[: 1], l.now_us,
    false AS made
FROM locked AS l
UNION ALL
SELECT m.name, m.key, m.shard, m.value, m.ts, m.capacity, NULL, NULL, c.now_us, true FROM made AS m, (SELECT a.now_us FROM asked AS a LIMIT 1) AS c
