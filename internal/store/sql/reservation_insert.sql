-- Record a reservation whose tokens were just taken.
--
-- $1 id, $2 ready_us, $3 stale_us, $4 expires_us, $5 release, then for each bucket $6 names, $7 keys,
-- $8 costs, $9 capacities, $10 rates, $11 steps, $12 step_us, $13 phase_us, $14 lowest, $15 shards, $16 plans, $17 calendars, $18 prices, $19 paid_us.
INSERT INTO ratelimit.reservations (id, state, ready_us, stale_us, expires_us, release,
    names, keys, costs, capacities, rates, steps, step_us, phase_us, lowest, shards, plans, calendars, prices, paid_us)
VALUES ($1::uuid, 'open', $2::bigint, $3::bigint, $4::bigint, $5::boolean,
    $6::text[], $7::text[], $8::float8[], $9::float8[], $10::float8[], $11::float8[], $12::bigint[], $13::bigint[], $14::float8[], $15::integer[], $16::text[], $17::text[], $18::float8[], $19::bigint[])
