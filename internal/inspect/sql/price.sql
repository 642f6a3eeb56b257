-- Returns share, paused_until_us and seen_us of the upstream of limit $1 and key $2.
SELECT p.share, p.paused_until_us, p.seen_us FROM ratelimit.prices AS p WHERE p.name = $1 AND p.key = $2
