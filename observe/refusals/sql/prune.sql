-- Deletes rows of minutes before $1, the oldest first, $2 at most, without rows that another transaction is deleting.
WITH old AS (
    SELECT o.minute, o.name, o.route, o.key, o.shadow
    FROM ratelimit.refusals AS o
    WHERE o.minute < $1
    ORDER BY o.minute, o.name, o.route, o.key, o.shadow
    LIMIT $2
    FOR UPDATE SKIP LOCKED
)
DELETE FROM ratelimit.refusals AS r
USING old
WHERE r.minute = old.minute AND r.name = old.name AND r.route = old.route AND r.key = old.key AND r.shadow = old.shadow
