-- Lock a reservation to the end of the transaction, and return it.
--
-- $1 id
--
-- An upsert that changes nothing, because a SELECT .. FOR UPDATE would take SIREAD locks on its way. When
-- there is no such reservation it makes one without a bucket, which the caller has to undo.
INSERT INTO ratelimit.reservations AS r (id, ready_us, expires_us, cost, capacity, rate, steps, step_us, phase_us, lowest, paid_us, release, state, name, key)
VALUES ($1::uuid, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, false, 'open', '', '')
ON CONFLICT (id) DO UPDATE SET state = r.state
RETURNING r.state, r.ready_us, r.stale_us, r.started_us, r.expires_us, r.release, r.name, r.key, r.shard, r.plan, r.calendar, r.cost,
    r.capacity, r.rate, r.steps, r.step_us, r.phase_us, r.lowest, r.paid_us, r.owed, r.settled, r.others::text
