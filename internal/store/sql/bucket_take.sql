-- Take from one bucket, in any transaction at any isolation level.
--
-- $1 name, $2 key, $3 shard   the bucket
-- $4 cost, $5 capacity        tokens
-- $6 rate, $8 steps           rate / steps tokens arrive with every step
-- $7 step_us, $9 phase_us     steps begin at phase_us + n * step_us
-- $10 lowest                  the least value that may remain: 0, or minus the tokens that may be owed
-- $11 as_of_us                the instant to decide at; null: the database's clock
-- $12 tolerance_us            a ts this far in the future was written by a wrong clock
-- $13 since_us, $14 until_us  the first and the last instant at which these terms hold; null: they always do
--
-- Returns one row: allowed, and the bucket's value, ts and capacity after the decision, and now_us. Where the row is of a time at
-- which the terms did not hold, or a window of another capacity, nothing is taken, and where they do not hold now there is no answer.
--
-- take decides on the newest version of the row, under its lock. It reads through no snapshot, so it
-- takes no SIREAD lock and cannot cause a serialization failure between different buckets. A refusal
-- still has to learn value and ts: refused rewrites the row as it stands, because a SELECT would read
-- through the snapshot. Its row is there and locked by then, so the zeros are never inserted.
WITH take AS (
    INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity)
    SELECT $1::text, $2::text, $3::integer, $5::float8 - $4::float8,
        greatest($9::bigint + (coalesce($11::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) - $9::bigint) / $7::bigint * $7::bigint, $13::bigint), $5::float8
    WHERE ($13::bigint IS NULL OR coalesce($11::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) BETWEEN $13::bigint AND $14::bigint)
    ON CONFLICT (name, key, shard) DO UPDATE SET
        value = least($5::float8, b.value + ((greatest(excluded.ts - b.ts, 0) + $7::bigint - 1) / $7::bigint)::float8 * $6::float8 / $8::float8) - $4::float8,
        ts = CASE WHEN b.ts > excluded.ts + $12::bigint AND b.ts > coalesce($11::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) + $12::bigint THEN excluded.ts ELSE greatest(b.ts, excluded.ts) END,
        capacity = CASE WHEN b.capacity = $5::float8 OR least($5::float8, b.value + ((greatest(excluded.ts - b.ts, 0) + $7::bigint - 1) / $7::bigint)::float8 * $6::float8 / $8::float8) >= $5::float8 THEN $5::float8 ELSE b.capacity END
    WHERE least($5::float8, b.value + ((greatest(excluded.ts - b.ts, 0) + $7::bigint - 1) / $7::bigint)::float8 * $6::float8 / $8::float8) - $4::float8 >= $10::float8
        AND ($13::bigint IS NULL OR b.ts BETWEEN $13::bigint AND $14::bigint) AND (b.capacity = $5::float8 OR $7::bigint = 1)
    RETURNING b.value, b.ts, b.capacity
), refused AS (
    INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity)
    SELECT $1::text, $2::text, $3::integer, 0, 0, 0
    WHERE NOT EXISTS (SELECT FROM take) AND ($13::bigint IS NULL OR coalesce($11::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) BETWEEN $13::bigint AND $14::bigint)
    ON CONFLICT (name, key, shard) DO UPDATE SET value = b.value
    RETURNING b.value, b.ts, b.capacity
)
SELECT answer.allowed, answer.value, answer.ts, answer.capacity,
    coalesce($11::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us
FROM (SELECT true AS allowed, value, ts, capacity FROM take UNION ALL SELECT false, value, ts, capacity FROM refused) AS answer
