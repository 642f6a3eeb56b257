-- Delete what is known of upstreams that nobody has reported of for long.
--
-- $1 as_of_us, $2 keep_us
DELETE FROM ratelimit.prices WHERE seen_us < coalesce($1::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) - $2::bigint
