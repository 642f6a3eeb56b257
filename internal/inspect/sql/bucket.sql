-- Returns name, key, shard, value, ts and leases of the rows of the bucket $2 of limit $1.
SELECT b.name, b.key, b.shard, b.value, b.ts, b.leases FROM ratelimit.buckets AS b WHERE b.name = $1 AND b.key = $2 ORDER BY b.shard LIMIT 127
