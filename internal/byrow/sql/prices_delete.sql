-- Delete the states of upstreams without recent reports, on all servers.
--
-- $1 before_us
DELETE FROM ratelimit.prices WHERE seen_us < $1::bigint
