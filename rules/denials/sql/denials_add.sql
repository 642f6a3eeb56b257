-- Adds to the rows of minute $1, which one process after the other does, in one order: $2 names, $3 routes, $4 keys,
-- $5 shadows, $6 refused, $7 costs, $8 last_us. No row is named twice.
INSERT INTO ratelimit.denials AS d (minute, name, route, key, shadow, refused, cost, last_us)
SELECT $1, r.name, r.route, r.key, r.shadow, r.refused, r.cost, r.last_us
FROM unnest($2::text[], $3::text[], $4::text[], $5::boolean[], $6::bigint[], $7::float8[], $8::bigint[])
    AS r (name, route, key, shadow, refused, cost, last_us)
ORDER BY r.name COLLATE "C", r.route COLLATE "C", r.key COLLATE "C", r.shadow
ON CONFLICT (minute, name, route, key, shadow) DO UPDATE SET
    refused = d.refused + EXCLUDED.refused,
    cost = d.cost + EXCLUDED.cost,
    last_us = greatest(d.last_us, EXCLUDED.last_us)
