-- Give back to a bucket what was taken ahead of it and not used.
--
-- $1 name, $2 key, $3 shard      the bucket
-- $4 unused, $5 taken            what is given back at most, and what was taken with it in one decision
-- $6 taken_us                    the ts of the bucket after that decision
-- $7 capacity, $8 rate, $9 steps as in bucket_take.sql
-- $10 until_us                   the last instant at which these terms hold, by the clock as it is when the row is at hand
-- $11 as_of_us                   as in bucket_take.sql
--
-- Returns one row, the tokens given back; or none where none are. A bucket that has no row is full.
--
-- given = min(unused, taken - arrived since): had the unused tokens never been taken, the bucket would hold at least so
-- many more. It held no more than its capacity - taken after the decision, so without them it would have lost to the capacity
-- no more than arrived - (taken - unused). As in buckets_charge.sql no time is credited.
WITH clock AS MATERIALIZED (SELECT coalesce($11::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us)
UPDATE ratelimit.buckets AS b SET
    value = least(greatest($7::float8, b.value), b.value + least($4::float8, $5::float8 - greatest(greatest(b.ts, clock.now_us) - $6::bigint, 0)::float8 * $8::float8 / $9::float8))
FROM clock
WHERE b.name = $1::text AND b.key = $2::text AND b.shard = $3::integer
    AND coalesce($11::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) <= $10::bigint
    AND least($4::float8, $5::float8 - greatest(greatest(b.ts, clock.now_us) - $6::bigint, 0)::float8 * $8::float8 / $9::float8) > 0
RETURNING least($4::float8, $5::float8 - greatest(greatest(b.ts, clock.now_us) - $6::bigint, 0)::float8 * $8::float8 / $9::float8) AS given
