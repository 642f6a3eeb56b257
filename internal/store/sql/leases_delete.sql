-- Delete leases on buckets whose rows this transaction has locked.
--
-- $1 name[], $2 key[], $3 fence[]   the leases
--
-- Each is looked up by itself, as in buckets_unmake.sql.
DELETE FROM ratelimit.leases AS d
WHERE d.ctid = ANY (ARRAY(
        SELECT l.ctid
        FROM unnest((SELECT $1::text[]), $2::text[], $3::bigint[]) AS a (name, key, fence),
            LATERAL (SELECT r.ctid FROM ratelimit.leases AS r WHERE r.name = a.name AND r.key = a.key AND r.fence = a.fence LIMIT 1) AS l))
