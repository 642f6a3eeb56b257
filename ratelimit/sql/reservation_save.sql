-- Save what changes of a reservation that this transaction has locked.
--
-- $1 id, $2 state, $3 ready_us, $4 stale_us, $5 started_us, $6 expires_us
--
-- An upsert for the reason in reservation_lock.sql; the row is there, so nothing is inserted.
INSERT INTO ratelimit.reservations (id, state, ready_us, stale_us, started_us, expires_us, release,
    names, keys, costs, capacities, rates, steps, step_us, phase_us, lowest)
VALUES ($1::uuid, $2::text, $3::bigint, $4::bigint, $5::bigint, $6::bigint, false, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}')
ON CONFLICT (id) DO UPDATE SET state = excluded.state, ready_us = excluded.ready_us, stale_us = excluded.stale_us,
    started_us = excluded.started_us, expires_us = excluded.expires_us
