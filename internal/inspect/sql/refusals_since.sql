-- Reads the minutes from $1 to before $2 (null: all later ones), the latest first, until they have more than $3 rows. Then it
-- returns the first minute of which it has seen all rows, or the only minute it has seen. It steps from one minute to the next
-- through the primary key, because a plan for all at once would sort them if statistics are old.
WITH RECURSIVE minutes AS (
    SELECT latest.minute, counted.n
    FROM (
        SELECT r.minute FROM ratelimit.refusals AS r
        WHERE r.minute >= $1 AND r.minute < coalesce($2::timestamptz, 'infinity') ORDER BY r.minute DESC LIMIT 1
    ) AS latest
    CROSS JOIN LATERAL (
        SELECT count(*) AS n FROM (SELECT FROM ratelimit.refusals AS r WHERE r.minute = latest.minute LIMIT $3::integer + 1) AS looked
    ) AS counted
    UNION ALL
    SELECT earlier.minute, minutes.n + counted.n
    FROM minutes
    CROSS JOIN LATERAL (
        SELECT r.minute FROM ratelimit.refusals AS r
        WHERE r.minute >= $1 AND r.minute < minutes.minute ORDER BY r.minute DESC LIMIT 1
    ) AS earlier
    CROSS JOIN LATERAL (
        SELECT count(*) AS n FROM (SELECT FROM ratelimit.refusals AS r WHERE r.minute = earlier.minute LIMIT $3::integer + 1) AS looked
    ) AS counted
    WHERE minutes.n <= $3::integer
)
SELECT CASE WHEN count(*) > 1 THEN min(minute) + interval '1 minute' ELSE min(minute) END
FROM minutes
HAVING max(n) > $3::integer
