-- Note that the work of a reservation has started, and until when it is kept, unless another call has changed it.
--
-- $1 id, $2 state, $3 ready_us, $4 started_us, $5 expires_us   the reservation as it was read
-- $6 started_us, $7 expires_us                                 the new columns
UPDATE ratelimit.reservations AS r SET started_us = $6::bigint, expires_us = $7::bigint
WHERE r.id = $1::uuid AND r.state = $2::text AND r.ready_us = $3::bigint AND r.started_us IS NOT DISTINCT FROM $4::bigint
    AND r.expires_us IS NOT DISTINCT FROM $5::bigint -- which keeps the plan from the index on it
