-- End the epoch of an adaptive limit and a key as price_turn.sql does, by a statement that goes to one server, as routed_read.sql.
--
-- $1 name, $2 key, $3 epoch, $4 outcomes, $5 accepted, $6 throttled, $7 share, $8 cut   as in price_turn.sql
-- $9 now_us
--
-- Returns as price_report.sql, and no row when somebody else has ended it.
UPDATE ratelimit.prices AS p SET
    epoch = p.epoch + 1,
    begun_us = $9::bigint,
    outcomes = greatest(p.outcomes - $4::bigint, 0),
    accepted = greatest(p.accepted - $5::float8, 0),
    throttled = greatest(p.throttled - $6::float8, 0),
    share = $7::float8,
    cut = $8::boolean
WHERE p.name = $1::text AND p.key = $2::text AND p.epoch = $3::bigint
RETURNING p.epoch, p.begun_us, p.outcomes, p.accepted, p.throttled, p.share, p.cut, p.paused_until_us, $9::bigint AS now_us
