-- Write rows that this transaction has locked.
--
-- $1 name[], $2 key[], $3 shard[]   the rows, distinct and sorted
-- $4 value[], $5 ts[], $6 capacity[]   their new columns
-- $7 taken[]                        more new columns, as array literals; null: none
-- $8 fence[], $9 first_us[], $10 last_us[]   the last fencing number, and the first and the last end of leases; null: none, or as they are
--
-- An upsert for the reason in buckets_lock.sql; the rows are there, so nothing is inserted.
INSERT INTO ratelimit.buckets (name, key, shard, value, ts, capacity, taken, fence, first_us, last_us)
SELECT u.name, u.key, u.shard, u.value, u.ts, u.capacity, u.taken::float8[], u.fence, u.first_us, u.last_us
FROM unnest((SELECT $1::text[]), $2::text[], $3::integer[], $4::float8[], $5::bigint[], $6::float8[], $7::text[],
        $8::bigint[], $9::bigint[], $10::bigint[])
        WITH ORDINALITY AS u (name, key, shard, value, ts, capacity, taken, fence, first_us, last_us, ord)
ORDER BY u.ord
ON CONFLICT (name, key, shard) DO UPDATE SET value = excluded.value, ts = excluded.ts, capacity = excluded.capacity,
    taken = excluded.taken, fence = excluded.fence,
    first_us = CASE WHEN excluded.value < excluded.capacity THEN coalesce(excluded.first_us, buckets.first_us) END,
    last_us = CASE WHEN excluded.value < excluded.capacity THEN coalesce(excluded.last_us, buckets.last_us) END
