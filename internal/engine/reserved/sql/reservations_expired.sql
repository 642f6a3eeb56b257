-- Find open reservations past their end, the oldest first.
--
-- $1 limit, $2 as_of_us
-- $3 after_us, $4 after_id   only rows after this one, in the order of expires_us, id
SELECT r.id::text, r.expires_us FROM ratelimit.reservations AS r
WHERE r.state = 'open'
    AND r.expires_us < coalesce($2::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint)
    AND r.expires_us >= $3::bigint AND (r.expires_us > $3::bigint OR r.id > $4::uuid)
ORDER BY r.expires_us, r.id
LIMIT $1::integer
