-- Find reservations that ended and whose end lies so far back that no call for them is expected, on all servers.
--
-- $1 limit, $2 before_us
SELECT r.id::text FROM ratelimit.reservations AS r
WHERE r.state <> 'open' AND r.expires_us < $2::bigint
ORDER BY r.expires_us
LIMIT $1::integer
