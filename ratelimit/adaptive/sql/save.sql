-- Save rows that lock.sql has locked: $1 names, $2 keys, $3 epoch, $4 begun_us, $5 seen_us, $6 outcomes, $7 accepted, $8 throttled,
-- $9 share, $10 cut, $11 paused_until_us.
UPDATE ratelimit.upstreams AS u SET
    epoch = n.epoch, begun_us = n.begun_us, seen_us = n.seen_us, outcomes = n.outcomes, accepted = n.accepted,
    throttled = n.throttled, share = n.share, cut = n.cut, paused_until_us = n.paused_until_us
FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::float8[], $8::float8[],
    $9::float8[], $10::boolean[], $11::bigint[])
    AS n (name, key, epoch, begun_us, seen_us, outcomes, accepted, throttled, share, cut, paused_until_us)
WHERE u.name = n.name AND u.key = n.key
