-- Delete the rows of keys without recent reports, a page of them, without those that another transaction has locked: $1 now_us,
-- $2 keep_us.
DELETE FROM ratelimit.upstreams AS d USING (
    SELECT u.name, u.key FROM ratelimit.upstreams AS u
    WHERE u.seen_us < coalesce($1::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) - $2::bigint
    LIMIT 1000
    FOR UPDATE SKIP LOCKED
) AS old
WHERE d.name = old.name AND d.key = old.key
