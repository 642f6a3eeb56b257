-- Returns name, key, rule, and at_us of the buckets with the keys $2, of limit $1 ('': of any): one row of their refusals
-- in the minutes from $3 to before $4, and one of the reservations among the $5 that end last. rule is the name of the rule that
-- decided last, at at_us, and tells the plan; a reservation has the plan of its key, and its start or its turn.
SELECT r.name, r.key, (array_agg(r.rule ORDER BY r.last_us DESC))[1], max(r.last_us)
FROM ratelimit.refusals AS r
WHERE r.minute >= $3 AND r.minute < $4 AND ($1 = '' OR r.name = $1) AND r.key = ANY ($2::text[]) AND r.rule <> ''
GROUP BY r.name, r.key
UNION ALL
SELECT i.name, i.key, (array_agg(i.name || coalesce(', plan ' || nullif(i.plan, ''), '') ORDER BY v.at_us DESC))[1], max(v.at_us)
FROM (
    SELECT s.name, s.key, s.plan, s.others,
        least(coalesce(s.started_us, s.ready_us), (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS at_us
    FROM ratelimit.reservations AS s ORDER BY s.expires_us DESC LIMIT $5::integer
) AS v
CROSS JOIN LATERAL (
    SELECT v.name, v.key, v.plan
    UNION ALL
    SELECT o ->> 'name', o ->> 'key', o ->> 'plan' FROM jsonb_array_elements(v.others) AS o
) AS i
WHERE ($1 = '' OR i.name = $1) AND i.key = ANY ($2::text[])
GROUP BY i.name, i.key
