-- Insert a reservation, or save the changes of a reservation that this transaction has locked.
--
-- $1 id, $2 state, $3 ready_us, $4 stale_us, $5 started_us, $6 expires_us, $7 release, then for each bucket $8 names, $9 keys, $10 costs,
-- and the terms it was last taken under: $11 capacities, $12 rates, $13 steps, $14 step_us, $15 phase_us, $16 lowest, $17 shards, $18 plans,
-- $19 calendars, $20 paid_us, $21 owed
--
-- An upsert for the reason in reservation_lock.sql. It also fills in the one without buckets that reservation_lock.sql has made.
INSERT INTO ratelimit.reservations (id, state, ready_us, stale_us, started_us, expires_us, release,
    names, keys, costs, capacities, rates, steps, step_us, phase_us, lowest, shards, plans, calendars, paid_us, owed)
VALUES ($1::uuid, $2::text, $3::bigint, $4::bigint, $5::bigint, $6::bigint, $7::boolean, $8::text[], $9::text[], $10::float8[],
    $11::float8[], $12::float8[], $13::float8[], $14::bigint[], $15::bigint[], $16::float8[], $17::integer[], $18::text[], $19::text[], $20::bigint[],
    $21::float8[])
ON CONFLICT (id) DO UPDATE SET state = excluded.state, ready_us = excluded.ready_us, stale_us = excluded.stale_us,
    started_us = excluded.started_us, expires_us = excluded.expires_us, release = excluded.release,
    names = excluded.names, keys = excluded.keys, costs = excluded.costs, plans = excluded.plans,
    capacities = excluded.capacities, rates = excluded.rates, steps = excluded.steps, step_us = excluded.step_us,
    phase_us = excluded.phase_us, lowest = excluded.lowest, shards = excluded.shards, calendars = excluded.calendars, paid_us = excluded.paid_us, owed = excluded.owed
