-- Lock rows to the end of the transaction, and return what they hold.
--
-- $1 name[], $2 key[], $3 shard[]   the rows, distinct and sorted, which is the order of locking
-- $4 capacity[], $5 step_us[], $6 phase_us[], $7 as_of_us   as in buckets_take.sql
--
-- Returns name, key, shard, value, ts, taken, leases, now_us and made for each. Rows that are not there are made, full, which
-- is what they stand for; made tells them.
--
-- made locks the rows that are there, and inserts and returns those that are not, all in one order. found reads those that are locked by an
-- upsert that changes nothing, because a SELECT .. FOR UPDATE reads through the snapshot and takes SIREAD locks on its way.
-- What a row is made by could also be told by its xmax, but in a partitioned table RETURNING has none.
WITH asked AS MATERIALIZED (
    SELECT u.*, clock.now_us, u.phase_us + (clock.now_us - u.phase_us) / u.step_us * u.step_us AS begun
    FROM unnest((SELECT $1::text[]), $2::text[], $3::integer[], $4::float8[], $5::bigint[], $6::bigint[])
            WITH ORDINALITY AS u (name, key, shard, capacity, step_us, phase_us, ord),
        (SELECT coalesce($7::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us) AS clock
), made AS (
    INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts)
    SELECT a.name, a.key, a.shard, a.capacity, a.begun FROM asked AS a ORDER BY a.ord
    ON CONFLICT (name, key, shard) DO UPDATE SET value = b.value WHERE false
    RETURNING b.name, b.key, b.shard, b.value, b.ts
), found AS (
    INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts)
    SELECT a.name, a.key, a.shard, a.capacity, a.begun FROM asked AS a
    WHERE (a.name, a.key, a.shard) NOT IN (SELECT m.name, m.key, m.shard FROM made AS m) ORDER BY a.ord
    ON CONFLICT (name, key, shard) DO UPDATE SET value = b.value
    RETURNING b.name, b.key, b.shard, b.value, b.ts, b.taken, b.leases
)
SELECT f.name, f.key, f.shard, f.value, f.ts, f.taken, f.leases, c.now_us, false AS made FROM found AS f, (SELECT a.now_us FROM asked AS a LIMIT 1) AS c
UNION ALL
SELECT m.name, m.key, m.shard, m.value, m.ts, NULL, NULL, c.now_us, true FROM made AS m, (SELECT a.now_us FROM asked AS a LIMIT 1) AS c
