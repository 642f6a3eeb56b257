-- Read the state of the upstream of an adaptive limit and a key.
--
-- $1 name, $2 key
--
-- Returns as price_report.sql, and no row when nothing is known.
SELECT p.epoch, p.begun_us, p.outcomes, p.accepted, p.throttled, p.share, p.cut, p.paused_until_us
FROM ratelimit.prices AS p WHERE p.name = $1::text AND p.key = $2::text
