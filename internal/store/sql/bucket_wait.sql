-- Wait until nobody else holds the row of a bucket, and lock it to the end of the transaction, before other rows are. It
-- answers nothing that is read, and makes no row: one that is not there, nobody holds.
--
-- $1 name, $2 key, $3 shard
SELECT r.ts FROM ratelimit.buckets AS r WHERE r.name = $1::text AND r.key = $2::text AND r.shard = $3::integer
FOR NO KEY UPDATE
