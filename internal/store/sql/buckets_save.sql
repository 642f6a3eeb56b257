-- Write rows that this transaction has locked.
--
-- $1 name[], $2 key[], $3 shard[]   the rows, distinct and sorted
-- $4 value[], $5 ts[]               their new columns
-- $6 taken[], $7 leases[]           more new columns, as array literals; null: none
--
-- An upsert for the reason in buckets_lock.sql; the rows are there, so nothing is inserted.
INSERT INTO ratelimit.buckets (name, key, shard, value, ts, taken, leases)
SELECT u.name, u.key, u.shard, u.value, u.ts, u.taken::float8[], u.leases::bigint[]
FROM unnest((SELECT $1::text[]), $2::text[], $3::integer[], $4::float8[], $5::bigint[], $6::text[], $7::text[])
        WITH ORDINALITY AS u (name, key, shard, value, ts, taken, leases, ord)
ORDER BY u.ord
ON CONFLICT (name, key, shard) DO UPDATE SET value = excluded.value, ts = excluded.ts,
    taken = excluded.taken, leases = excluded.leases
