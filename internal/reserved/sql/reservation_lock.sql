-- Lock a reservation to the end of the transaction, and return it.
--
-- $1 id
--
-- An upsert that changes nothing, because a SELECT .. FOR UPDATE would take SIREAD locks on its way. When
-- there is no such reservation it makes one without buckets, which the caller has to undo.
INSERT INTO ratelimit.reservations AS r (id, state, ready_us, expires_us, release,
    names, keys, costs, capacities, rates, steps, step_us, phase_us, lowest)
VALUES ($1::uuid, 'open', 0, 0, false, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}')
ON CONFLICT (id) DO UPDATE SET state = r.state
RETURNING r.state, r.ready_us, r.stale_us, r.started_us, r.expires_us, r.release,
    r.names, r.keys, r.costs, r.capacities, r.rates, r.steps, r.step_us, r.phase_us, r.lowest, r.shards, r.plans, r.calendars, r.paid_us, r.owed
