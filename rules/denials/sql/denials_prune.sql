-- Deletes rows of minutes before $1, the oldest first, $2 at most, and none that somebody else is deleting.
WITH old AS (
    SELECT o.minute, o.name, o.route, o.key, o.shadow
    FROM ratelimit.denials AS o
    WHERE o.minute < $1
    ORDER BY o.minute, o.name, o.route, o.key, o.shadow
    LIMIT $2
    FOR UPDATE SKIP LOCKED
)
DELETE FROM ratelimit.denials AS d
USING old
WHERE d.minute = old.minute AND d.name = old.name AND d.route = old.route AND d.key = old.key AND d.shadow = old.shadow
