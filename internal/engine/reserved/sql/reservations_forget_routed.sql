-- As reservations_forget.sql, where Citus distributes the table: it locks no rows that it finds on several servers, so none are skipped.
--
-- $1 limit, $2 as_of_us, $3 keep_us: how long after expires_us
DELETE FROM ratelimit.reservations AS d WHERE d.state <> 'open' AND d.id = ANY (ARRAY(
    SELECT r.id FROM ratelimit.reservations AS r
    WHERE r.state <> 'open'
        AND r.expires_us < coalesce($2::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) - $3::bigint
    ORDER BY r.expires_us
    LIMIT $1::integer))
