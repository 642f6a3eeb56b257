-- Returns share, paused_until_us and seen_us of the upstream of limit $1 and key $2.
SELECT u.share, u.paused_until_us, u.seen_us FROM ratelimit.upstreams AS u WHERE u.name = $1 AND u.key = $2
