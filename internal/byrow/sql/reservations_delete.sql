-- Delete reservations that have ended.
--
-- $1 id[]
DELETE FROM ratelimit.reservations AS r WHERE r.id = ANY ($1::uuid[]) AND r.state <> 'open'
