-- Returns name, shadow, minute, refused, cost and allowed of each minute from $1 to before $2, of the limits $3 or of all with null,
-- and of the keys $4 or of all with null.
SELECT r.name, r.shadow, r.minute, sum(r.refused)::bigint, sum(r.cost), sum(r.allowed)::bigint
FROM ratelimit.refusals AS r
WHERE r.minute >= $1 AND r.minute < $2 AND ($3::text[] IS NULL OR r.name = ANY ($3::text[])) AND ($4::text[] IS NULL OR r.key = ANY ($4::text[]))
GROUP BY r.name, r.shadow, r.minute
HAVING sum(r.refused) > 0 OR sum(r.allowed) > 0
ORDER BY r.minute
