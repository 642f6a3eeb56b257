-- Lock the rows of keys, without those that another transaction has locked: $1 names, $2 keys.
--
-- Returns name, key, epoch, begun_us, seen_us, outcomes, accepted, throttled, share, cut and paused_until_us.
SELECT u.name, u.key, u.epoch, u.begun_us, u.seen_us, u.outcomes, u.accepted, u.throttled, u.share, u.cut, u.paused_until_us
FROM unnest($1::text[], $2::text[]) AS n (name, key)
JOIN ratelimit.upstreams AS u ON u.name = n.name AND u.key = n.key
FOR UPDATE OF u SKIP LOCKED
