-- Returns name, route, key, refused, cost and last_us of the largest sums of refusals in the minutes from $1 to before $2, at most
-- $7: for each name; with $3 for each name and route, with $4 for each name and key. $5 is the only name, or ''.
-- $6 asks for shadows. With $8 refused has the sums of allowed requests, by which they are ordered. It groups by keys first: they differ most, so that a sort compares little.
SELECT r.name, CASE WHEN $3 THEN r.route ELSE '' END, CASE WHEN $4 THEN r.key ELSE '' END,
    sum(CASE WHEN $8 THEN r.allowed ELSE r.refused END)::bigint, sum(r.cost), max(r.last_us)
FROM ratelimit.refusals AS r
WHERE r.minute >= $1 AND r.minute < $2 AND ($5 = '' OR r.name = $5) AND r.shadow = $6
GROUP BY 3, 2, 1
HAVING sum(CASE WHEN $8 THEN r.allowed ELSE r.refused END) > 0
ORDER BY 4 DESC, 1, 2, 3
LIMIT $7
