-- Read a reservation, and lock nothing. Returns what reservation_lock.sql does, and no row if there is none.
--
-- $1 id
SELECT r.state, r.ready_us, r.stale_us, r.started_us, r.expires_us, r.release, r.name, r.key, r.shard, r.plan, r.calendar, r.cost,
    r.capacity, r.rate, r.steps, r.step_us, r.phase_us, r.lowest, r.paid_us, r.owed, r.settled, r.others::text
FROM ratelimit.reservations AS r
WHERE r.id = $1::uuid
