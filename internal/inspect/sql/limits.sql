-- Returns the names of limits that have buckets: those after $1, $2 at most. It steps from one name to the next through the primary
-- key, however many buckets each has.
WITH RECURSIVE names AS (
    (SELECT b.name, 1 AS n FROM ratelimit.buckets AS b WHERE b.name > $1 ORDER BY b.name LIMIT 1)
    UNION ALL
    SELECT following.name, names.n + 1
    FROM names
    CROSS JOIN LATERAL (SELECT b.name FROM ratelimit.buckets AS b WHERE b.name > names.name ORDER BY b.name LIMIT 1) AS following
    WHERE names.n < $2::integer
)
SELECT name FROM names ORDER BY n
