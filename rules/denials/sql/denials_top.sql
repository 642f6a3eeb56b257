-- Returns name, route, key, refused, cost and last_us of what was refused most in the minutes from $1 to before $2, at most
-- $7: for each name; with $3 for each name and route, with $4 for each name and key. $5 is the only name, or ''.
-- $6 asks for shadows. It groups by keys first: they differ most, so that a sort compares little.
SELECT d.name, CASE WHEN $3 THEN d.route ELSE '' END, CASE WHEN $4 THEN d.key ELSE '' END,
    sum(d.refused)::bigint, sum(d.cost), max(d.last_us)
FROM ratelimit.denials AS d
WHERE d.minute >= $1 AND d.minute < $2 AND ($5 = '' OR d.name = $5) AND d.shadow = $6
GROUP BY 3, 2, 1
HAVING sum(d.refused) > 0
ORDER BY 4 DESC, 1, 2, 3
LIMIT $7
