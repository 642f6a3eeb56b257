-- Write rows that this transaction has locked.
--
-- $1 name[], $2 key[], $3 shard[]   the rows, distinct and sorted
-- $4 value[], $5 ts[], $6 capacity[]   their new columns
-- $7 taken[], $8 leased[]              more new columns, as array literals; null: none. leased with only the last number: the rest is as it is
--
-- An upsert for the reason in buckets_lock.sql; the rows are there, so nothing is inserted.
INSERT INTO ratelimit.buckets (name, key, shard, value, ts, capacity, taken, leased)
SELECT u.name, u.key, u.shard, u.value, u.ts, u.capacity, u.taken::float8[], u.leased::bigint[]
FROM unnest((SELECT $1::text[]), $2::text[], $3::integer[], $4::float8[], $5::bigint[], $6::float8[], $7::text[], $8::text[])
        WITH ORDINALITY AS u (name, key, shard, value, ts, capacity, taken, leased, ord)
ORDER BY u.ord
ON CONFLICT (name, key, shard) DO UPDATE SET value = excluded.value, ts = excluded.ts, capacity = excluded.capacity,
    taken = excluded.taken, leased = CASE
        WHEN excluded.value >= excluded.capacity THEN excluded.leased[: 1]
        WHEN cardinality(excluded.leased) = 1 THEN excluded.leased || buckets.leased[2 :]
        ELSE excluded.leased END
