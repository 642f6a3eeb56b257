-- Looks at $3 + 1 rows at most of the minutes from $1 to before $2 (null: all later ones), the latest first. When there are as many, it returns the
-- first minute of which it has seen all rows; and that of the only minute it has seen.
SELECT CASE WHEN min(looked.minute) < max(looked.minute) THEN min(looked.minute) + interval '1 minute' ELSE min(looked.minute) END
FROM (
    SELECT d.minute FROM ratelimit.denials AS d
    WHERE d.minute >= $1 AND d.minute < coalesce($2::timestamptz, 'infinity')
    ORDER BY d.minute DESC
    LIMIT $3::integer + 1
) AS looked
HAVING count(looked.minute) > $3::integer
