-- Fill buckets to capacity: debts are forgotten, fixed windows keep their phase.
--
-- $1 name[], $2 key[], $3 shard[]                     the buckets, distinct and sorted
-- $4 capacity[], $5 step_us[], $6 phase_us[], $7 as_of_us   as in buckets_take.sql
--
-- An upsert and not a DELETE, which would find its rows through the snapshot and so take SIREAD locks.
INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts)
SELECT u.name, u.key, u.shard, u.capacity, u.phase_us + (clock.now_us - u.phase_us) / u.step_us * u.step_us
FROM unnest($1::text[], $2::text[], $3::integer[], $4::float8[], $5::bigint[], $6::bigint[])
        WITH ORDINALITY AS u (name, key, shard, capacity, step_us, phase_us, ord),
    (SELECT coalesce($7::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us) AS clock
ORDER BY u.ord
ON CONFLICT (name, key, shard) DO UPDATE SET value = excluded.value, ts = excluded.ts
