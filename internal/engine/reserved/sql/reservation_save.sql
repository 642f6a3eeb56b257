-- Insert a reservation, or save the changes of a reservation that this transaction has locked.
--
-- $1 id, $2 state, $3 ready_us, $4 stale_us, $5 started_us, $6 expires_us, $7 release, then of its first bucket $8 name, $9 key,
-- $10 shard, $11 plan, $12 calendar, $13 cost, the terms it was last taken under: $14 capacity, $15 rate, $16 steps, $17 step_us,
-- $18 phase_us, $19 lowest, and $20 paid_us, $21 owed, $22 settled. $23 others
--
-- An upsert for the reason in reservation_lock.sql. It also fills in the one without a bucket that reservation_lock.sql has made.
INSERT INTO ratelimit.reservations (id, state, ready_us, stale_us, started_us, expires_us, release, name, key, shard, plan, calendar, cost,
    capacity, rate, steps, step_us, phase_us, lowest, paid_us, owed, settled, others)
VALUES ($1::uuid, $2::text, $3::bigint, $4::bigint, $5::bigint, $6::bigint, $7::boolean, $8::text,
    $9::text, $10::integer, $11::text, $12::text, $13::float8, $14::float8, $15::float8, $16::float8, $17::bigint,
    $18::bigint, $19::float8, $20::bigint, $21::float8, $22::float8, $23::text::jsonb)
ON CONFLICT (id) DO UPDATE SET state = excluded.state, ready_us = excluded.ready_us, stale_us = excluded.stale_us, started_us = excluded.started_us, expires_us = excluded.expires_us, release = excluded.release,
    name = excluded.name, key = excluded.key, shard = excluded.shard, plan = excluded.plan, calendar = excluded.calendar, cost = excluded.cost,
    capacity = excluded.capacity, rate = excluded.rate, steps = excluded.steps, step_us = excluded.step_us, phase_us = excluded.phase_us,
    lowest = excluded.lowest, paid_us = excluded.paid_us, owed = excluded.owed, settled = excluded.settled, others = excluded.others
