-- Add what was reported to a process of an adaptive limit to the row of the limit and the key, or make it. It is a
-- transaction of its own, or one with those for other rows.
--
-- $1 name, $2 key
-- $3 outcomes, $4 accepted, $5 throttled   how many, and their tokens
-- $6 retry_after_us                        how long the upstream wants to be left alone; 0: it has not said so
-- $7 share                                 of a row that is made
-- $8 as_of_us
--
-- Returns epoch, begun_us, outcomes, accepted, throttled, share, cut, paused_until_us and now_us.
INSERT INTO ratelimit.prices AS p (name, key, epoch, begun_us, seen_us, outcomes, accepted, throttled, share, cut, paused_until_us)
SELECT $1::text, $2::text, 0, t.now_us, t.now_us, $3::bigint, $4::float8, $5::float8, $7::float8, false,
    CASE WHEN $6::bigint = 0 THEN 0 ELSE t.now_us + $6::bigint END
FROM (SELECT coalesce($8::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us) AS t
ON CONFLICT (name, key) DO UPDATE SET
    seen_us = excluded.seen_us,
    outcomes = p.outcomes + excluded.outcomes,
    accepted = p.accepted + excluded.accepted,
    throttled = p.throttled + excluded.throttled,
    paused_until_us = greatest(p.paused_until_us, excluded.paused_until_us)
RETURNING p.epoch, p.begun_us, p.outcomes, p.accepted, p.throttled, p.share, p.cut, p.paused_until_us,
    coalesce($8::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us
