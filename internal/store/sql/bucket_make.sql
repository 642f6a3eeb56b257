-- Write one row in a transaction of the statement's own, unless somebody has made it since it was found missing.
--
-- $1 name, $2 key, $3 shard           the row
-- $4 value, $5 ts, $6 leases          what it holds from now on
--
-- Returns true, or no row when it is there.
INSERT INTO ratelimit.buckets (name, key, shard, value, ts, leases)
VALUES ($1::text, $2::text, $3::integer, $4::float8, $5::bigint, $6::bigint[])
ON CONFLICT (name, key, shard) DO NOTHING
RETURNING true
