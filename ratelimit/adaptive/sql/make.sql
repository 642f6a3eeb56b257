-- Insert rows for keys that have none, in one order for every process: $1 names, $2 keys, $3 now_us. No key is named twice.
INSERT INTO ratelimit.upstreams (name, key, epoch, begun_us, seen_us, outcomes, accepted, throttled, share, cut, paused_until_us)
SELECT n.name, n.key, 0, c.now_us, c.now_us, 0, 0, 0, 1, false, 0
FROM unnest($1::text[], $2::text[]) AS n (name, key),
    (SELECT coalesce($3::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now_us) AS c
WHERE NOT EXISTS (SELECT FROM ratelimit.upstreams AS u WHERE u.name = n.name AND u.key = n.key) -- the insert would wait for its lock
ORDER BY n.name COLLATE "C", n.key COLLATE "C"
ON CONFLICT (name, key) DO NOTHING
