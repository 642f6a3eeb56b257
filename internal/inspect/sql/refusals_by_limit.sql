-- Returns name, shadow, minute, refused and cost of each minute from $1 to before $2, of the limits $3.
SELECT d.name, d.shadow, d.minute, sum(d.refused)::bigint, sum(d.cost)
FROM ratelimit.denials AS d
WHERE d.minute >= $1 AND d.minute < $2 AND d.name = ANY ($3::text[])
GROUP BY d.name, d.shadow, d.minute
HAVING sum(d.refused) > 0
ORDER BY d.minute
