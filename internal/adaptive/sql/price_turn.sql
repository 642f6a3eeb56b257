-- End the epoch of an adaptive limit and a key. The first process does, and the others change nothing.
--
-- $1 name, $2 key, $3 epoch                the epoch to end
-- $4 outcomes, $5 accepted, $6 throttled   the counts of that epoch; later reports belong to the next
-- $7 share, $8 cut                         what follows
-- $9 begun_us                              when the next one begins
--
-- Returns as price_report.sql, and no row if another process has ended it.
UPDATE ratelimit.prices AS p SET
    epoch = p.epoch + 1,
    begun_us = $9::bigint,
    outcomes = greatest(p.outcomes - $4::bigint, 0),
    accepted = greatest(p.accepted - $5::float8, 0),
    throttled = greatest(p.throttled - $6::float8, 0),
    share = $7::float8,
    cut = $8::boolean
WHERE p.name = $1::text AND p.key = $2::text AND p.epoch = $3::bigint
RETURNING p.epoch, p.begun_us, p.outcomes, p.accepted, p.throttled, p.share, p.cut, p.paused_until_us
