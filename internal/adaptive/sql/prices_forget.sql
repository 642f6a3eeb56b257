-- Delete the states of upstreams without recent reports. It skips rows that another transaction has locked.
--
-- $1 as_of_us, $2 keep_us
WITH old AS (
    SELECT p.name, p.key FROM ratelimit.prices AS p
    WHERE p.seen_us < coalesce($1::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) - $2::bigint
    FOR UPDATE SKIP LOCKED
)
DELETE FROM ratelimit.prices AS d USING old WHERE d.name = old.name AND d.key = old.key
