-- Lock rows to the end of the transaction, and return their columns.
--
-- $1 name[], $2 key[], $3 shard[]   the rows, distinct and sorted, which is the order of locking
-- $4 capacity[], $5 step_us[], $6 phase_us[], $7 as_of_us   the terms, as in take_1, and the instant
--
-- Returns name, key, shard, value, ts, capacity, taken, leases, now_us and made for each. Missing rows are inserted full, because a missing
-- row is a full bucket; made marks them. leases is only the last fencing number, which leases_read.sql adds the leases to.
--
-- An upsert that changes nothing, because a SELECT .. FOR UPDATE reads through the snapshot and takes SIREAD locks on its way. An
-- inserted row has the number 0, which no lease has, and which an existing row never returns. So made is known without xmax, whose value
-- here no manual promises. What follows in the transaction writes the row or deletes it.
INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity, leased)
SELECT u.name, u.key, u.shard, u.capacity, u.phase_us + (clock.now_us - u.phase_us) / u.step_us * u.step_us, u.capacity, '{0}'
FROM unnest((SELECT $1::text[]), $2::text[], $3::integer[], $4::float8[], $5::bigint[], $6::bigint[])
        WITH ORDINALITY AS u (name, key, shard, capacity, step_us, phase_us, ord),
    (SELECT coalesce($7::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us) AS clock
ORDER BY u.ord
ON CONFLICT (name, key, shard) DO UPDATE SET leased = CASE WHEN b.leased[1] <> 0 THEN b.leased END
RETURNING b.name, b.key, b.shard, b.value, b.ts, b.capacity, b.taken, CASE WHEN b.leased[1] <> 0 THEN b.leased[: 1] END,
    coalesce($7::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now_us,
    coalesce(b.leased[1] = 0, false) AS made
