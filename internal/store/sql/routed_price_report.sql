-- Add what was reported as price_report.sql does, by a statement that goes to one server, as routed_read.sql.
--
-- $1 name, $2 key, $3 outcomes, $4 accepted, $5 throttled
-- $6 paused_until_us   until when the upstream wants to be left alone; 0: it has not said so
-- $7 share             of a row that is made
-- $8 now_us
--
-- Returns epoch, begun_us, outcomes, accepted, throttled, share, cut, paused_until_us and now_us.
INSERT INTO ratelimit.prices AS p (name, key, epoch, begun_us, seen_us, outcomes, accepted, throttled, share, cut, paused_until_us)
VALUES ($1::text, $2::text, 0, $8::bigint, $8::bigint, $3::bigint, $4::float8, $5::float8, $7::float8, false, $6::bigint)
ON CONFLICT (name, key) DO UPDATE SET
    seen_us = excluded.seen_us,
    outcomes = p.outcomes + excluded.outcomes,
    accepted = p.accepted + excluded.accepted,
    throttled = p.throttled + excluded.throttled,
    paused_until_us = greatest(p.paused_until_us, excluded.paused_until_us)
RETURNING p.epoch, p.begun_us, p.outcomes, p.accepted, p.throttled, p.share, p.cut, p.paused_until_us, $8::bigint AS now_us
