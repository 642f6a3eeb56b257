-- Write one row that this transaction has locked. It goes to one server, as row_read.sql.
--
-- $1 name, $2 key, $3 shard                           the row
-- $4 value, $5 ts, $6 capacity, $7 taken              its new columns
-- $8 fence, $9 first_us, $10 last_us                  as in buckets_save.sql
--
-- An upsert for the reason in buckets_lock.sql; the row is there, so nothing is inserted.
INSERT INTO ratelimit.buckets (name, key, shard, value, ts, capacity, taken, fence, first_us, last_us)
VALUES ($1::text, $2::text, $3::integer, $4::float8, $5::bigint, $6::float8, $7::float8[], $8::bigint, $9::bigint, $10::bigint)
ON CONFLICT (name, key, shard) DO UPDATE SET value = excluded.value, ts = excluded.ts, capacity = excluded.capacity,
    taken = excluded.taken, fence = excluded.fence,
    first_us = CASE WHEN excluded.value < excluded.capacity THEN coalesce(excluded.first_us, buckets.first_us) END,
    last_us = CASE WHEN excluded.value < excluded.capacity THEN coalesce(excluded.last_us, buckets.last_us) END
