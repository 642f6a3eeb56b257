-- Adds to the rows of minute $1, in one order for every process: $2 names, $3 routes, $4 keys, $5 shadows, $6 refused, $7 costs,
-- $8 last_us, $9 allowed, $10 rules. No row is named twice.
INSERT INTO ratelimit.refusals AS r (minute, name, route, key, shadow, refused, cost, last_us, allowed, rule)
SELECT $1, n.name, n.route, n.key, n.shadow, n.refused, n.cost, n.last_us, n.allowed, n.rule
FROM unnest($2::text[], $3::text[], $4::text[], $5::boolean[], $6::bigint[], $7::float8[], $8::bigint[], $9::bigint[], $10::text[])
    AS n (name, route, key, shadow, refused, cost, last_us, allowed, rule)
ORDER BY n.name COLLATE "C", n.route COLLATE "C", n.key COLLATE "C", n.shadow
ON CONFLICT (minute, name, route, key, shadow) DO UPDATE SET
    refused = r.refused + EXCLUDED.refused,
    allowed = r.allowed + EXCLUDED.allowed,
    cost = r.cost + EXCLUDED.cost,
    rule = CASE WHEN EXCLUDED.rule = '' OR EXCLUDED.last_us < r.last_us AND r.rule <> '' THEN r.rule ELSE EXCLUDED.rule END,
    last_us = greatest(r.last_us, EXCLUDED.last_us)
