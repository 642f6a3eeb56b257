-- Returns minute, refused and cost of each minute from $1 to before $2: of limit $3, or of all with '', of key $4, or of all
-- with null. $5 asks for shadows.
SELECT d.minute, sum(d.refused)::bigint, sum(d.cost)
FROM ratelimit.denials AS d
WHERE d.minute >= $1 AND d.minute < $2 AND ($3 = '' OR d.name = $3) AND ($4::text IS NULL OR d.key = $4::text) AND d.shadow = $5
GROUP BY d.minute
HAVING sum(d.refused) > 0
ORDER BY d.minute
