-- Delete what is known of upstreams that nobody has reported of for long, on all servers.
--
-- $1 before_us
DELETE FROM ratelimit.prices WHERE seen_us < $1::bigint
