-- Save what changes of a reservation that this transaction has locked.
--
-- $1 id, $2 state, $3 ready_us, $4 stale_us, $5 started_us, $6 expires_us, then for each bucket the terms it was
-- last taken under: $7 capacities, $8 rates, $9 steps, $10 step_us, $11 phase_us, $12 lowest, $13 shards, $14 calendars, $15 paid_us
--
-- An upsert for the reason in reservation_lock.sql; the row is there, so nothing is inserted.
INSERT INTO ratelimit.reservations (id, state, ready_us, stale_us, started_us, expires_us, release,
    names, keys, costs, capacities, rates, steps, step_us, phase_us, lowest, shards, calendars, paid_us)
VALUES ($1::uuid, $2::text, $3::bigint, $4::bigint, $5::bigint, $6::bigint, false, '{}', '{}', '{}',
    $7::float8[], $8::float8[], $9::float8[], $10::bigint[], $11::bigint[], $12::float8[], $13::integer[], $14::text[], $15::bigint[])
ON CONFLICT (id) DO UPDATE SET state = excluded.state, ready_us = excluded.ready_us, stale_us = excluded.stale_us,
    started_us = excluded.started_us, expires_us = excluded.expires_us,
    capacities = excluded.capacities, rates = excluded.rates, steps = excluded.steps, step_us = excluded.step_us,
    phase_us = excluded.phase_us, lowest = excluded.lowest, shards = excluded.shards, calendars = excluded.calendars, paid_us = excluded.paid_us
