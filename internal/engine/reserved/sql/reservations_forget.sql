-- Delete reservations that ended and whose end lies so far back that no call for them is expected.
--
-- $1 limit, $2 as_of_us, $3 keep_us: how long after expires_us
DELETE FROM ratelimit.reservations WHERE id IN (
    SELECT r.id FROM ratelimit.reservations AS r
    WHERE r.state <> 'open'
        AND r.expires_us < coalesce($2::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) - $3::bigint
    ORDER BY r.expires_us
    LIMIT $1::integer
    FOR UPDATE SKIP LOCKED)
