-- Returns minute, refused and cost of each minute from $1 to before $2: of limit $3, or of all with '', of key $4, or of all
-- with null. $5 asks for shadows.
SELECT r.minute, sum(r.refused)::bigint, sum(r.cost)
FROM ratelimit.refusals AS r
WHERE r.minute >= $1 AND r.minute < $2 AND ($3 = '' OR r.name = $3) AND ($4::text IS NULL OR r.key = $4::text) AND r.shadow = $5
GROUP BY r.minute
HAVING sum(r.refused) > 0
ORDER BY r.minute
