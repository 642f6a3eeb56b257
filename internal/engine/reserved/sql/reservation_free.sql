-- Lock a reservation that is open to the end of the transaction, and return it as reservation_lock.sql does, unless another
-- transaction holds it.
--
-- $1 id
SELECT r.state, r.ready_us, r.stale_us, r.started_us, r.expires_us, r.release, r.name, r.key, r.shard, r.plan, r.calendar, r.cost,
    r.capacity, r.rate, r.steps, r.step_us, r.phase_us, r.lowest, r.paid_us, r.owed, r.settled, r.others::text
FROM ratelimit.reservations AS r
WHERE r.id = $1::uuid AND r.state = 'open'
FOR UPDATE SKIP LOCKED
