-- Add a process's reports on an adaptive limit to the row of the limit and the key, or insert the row, at the instant that
-- clock.sql returned before it in the same transaction. Citus lets no statement return an instant that it looks up, and none have
-- one in a CASE.
--
-- $1 name, $2 key
-- $3 outcomes, $4 accepted, $5 throttled   how many, and their tokens
-- $6 retry_after_us                        how long the upstream wants to be left alone; 0: it has not said so
--
-- Returns epoch, begun_us, outcomes, accepted, throttled, share, cut and paused_until_us.
INSERT INTO ratelimit.prices AS p (name, key, epoch, begun_us, seen_us, outcomes, accepted, throttled, share, cut, paused_until_us)
VALUES ($1::text, $2::text, 0, current_setting('ratelimit.now_us')::bigint, current_setting('ratelimit.now_us')::bigint,
    $3::bigint, $4::float8, $5::float8, 1, false, (current_setting('ratelimit.now_us')::bigint + $6::bigint) * least($6::bigint, 1))
ON CONFLICT (name, key) DO UPDATE SET
    seen_us = excluded.seen_us,
    outcomes = p.outcomes + excluded.outcomes,
    accepted = p.accepted + excluded.accepted,
    throttled = p.throttled + excluded.throttled,
    paused_until_us = greatest(p.paused_until_us, excluded.paused_until_us)
RETURNING p.epoch, p.begun_us, p.outcomes, p.accepted, p.throttled, p.share, p.cut, p.paused_until_us
