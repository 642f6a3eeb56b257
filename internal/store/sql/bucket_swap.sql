-- Write one row in a transaction of the statement's own, unless it has changed since it was read.
--
-- $1 name, $2 key, $3 shard           the row
-- $4 value, $5 ts, $6 leases          what it holds from now on
-- $7 value, $8 ts, $9 leases          what it held
--
-- Returns true, or no row when it has changed. One that somebody has deleted meanwhile is not made again: what it held when it was
-- read need not be what it held then.
UPDATE ratelimit.buckets AS b SET value = $4::float8, ts = $5::bigint, leases = $6::bigint[]
WHERE b.name = $1::text AND b.key = $2::text AND b.shard = $3::integer
    AND b.value = $7::float8 AND b.ts = $8::bigint AND b.leases IS NOT DISTINCT FROM $9::bigint[] AND b.taken IS NULL
RETURNING true
