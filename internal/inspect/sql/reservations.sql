-- Looks at $3 reservations at most, in the order of expires_us and id, from those after $1 and $2 on. Returns the matching
-- reservations, $8 at most: id, state, ready_us, stale_us, started_us, expires_us, release, name, key, plan, cost, settled, others,
-- whether it matches, and n, how many were read so far. When it looked at $3, the last one is among them, whether it matches or
-- not. A reservation matches if its state is $4 ('': any), if it is open and not ready (only with $5), and if one of its buckets is
-- of limit $6 ('': any) and has one of the keys $7 (null: any).
SELECT m.id::text, m.state, m.ready_us, m.stale_us, m.started_us, m.expires_us, m.release, m.name, m.key, m.plan, m.cost, m.settled, m.others::text, m.matches, m.n
FROM (
    SELECT looked.*, row_number() OVER (ORDER BY looked.expires_us, looked.id) AS n,
        ($4 = '' OR looked.state = $4)
            AND (NOT $5 OR looked.state = 'open' AND looked.ready_us > (extract(epoch FROM statement_timestamp()) * 1000000)::bigint)
            AND (($6 = '' OR looked.name = $6) AND ($7::text[] IS NULL OR looked.key = ANY ($7::text[])) OR EXISTS (
                SELECT FROM jsonb_array_elements(looked.others) AS bucket
                WHERE ($6 = '' OR bucket ->> 'name' = $6) AND ($7::text[] IS NULL OR bucket ->> 'key' = ANY ($7::text[])))) AS matches
    FROM (
        SELECT r.id, r.state, r.ready_us, r.stale_us, r.started_us, r.expires_us, r.release, r.name, r.key, r.plan, r.cost, r.settled, r.others
        FROM ratelimit.reservations AS r
        WHERE r.expires_us >= $1::bigint AND (r.expires_us > $1::bigint OR r.id > $2::uuid)
        ORDER BY r.expires_us, r.id
        LIMIT $3::integer
    ) AS looked
) AS m
WHERE m.matches OR m.n = $3::integer
ORDER BY m.expires_us, m.id
LIMIT $8::integer
