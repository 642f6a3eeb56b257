-- Returns the reservation $1 in the columns of reservations.sql.
SELECT r.id::text, r.state, r.ready_us, r.stale_us, r.started_us, r.expires_us, r.release, r.name, r.key, r.plan, r.cost, r.settled, r.others::text, true, 1
FROM ratelimit.reservations AS r
WHERE r.id = $1::uuid
