-- Take from one sliding window, in any transaction at any isolation level.
--
-- $1 name, $2 key, $3 shard   the bucket
-- $4 cost, $5 capacity        tokens
-- $6 step_us, $7 period_us    the length of a slice, and of all slices of a period
-- $8 phase_us                 slices begin at phase_us + n * step_us
-- $9 lowest                   the least value that may remain
-- $10 as_of_us, $11 tolerance_us, $12 since_us, $13 until_us   as in bucket_take.sql
--
-- Returns one row: allowed, and the bucket's value, ts, capacity and taken after the decision, and now_us. Where the row is not as
-- these terms leave it, nothing is taken, and where they do not hold now there is no answer.
--
-- take and refused are the two of bucket_take.sql.
WITH take AS (
    INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity, taken)
    SELECT $1::text, $2::text, $3::integer, $5::float8 - $4::float8,
        greatest($8::bigint + (coalesce($10::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) - $8::bigint) / $6::bigint * $6::bigint, $12::bigint), $5::float8,
        ARRAY[$6::bigint, $5::float8 - $4::float8, $4::float8, 0]
    WHERE ($12::bigint IS NULL OR coalesce($10::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) BETWEEN $12::bigint AND $13::bigint)
    ON CONFLICT (name, key, shard) DO UPDATE SET
        value = CASE WHEN excluded.ts - $7::bigint > b.ts THEN excluded.value
            ELSE $5::float8 - (b.taken[3] + $4::float8 - b.taken[least((($7::bigint - greatest(excluded.ts - b.ts, 0)) / $6::bigint + 4)::integer, cardinality(b.taken))]) END,
        ts = greatest(b.ts, excluded.ts),
        capacity = excluded.capacity,
        taken = CASE WHEN excluded.ts - $7::bigint > b.ts THEN excluded.taken
            ELSE ARRAY[$6::bigint, $5::float8 - (b.taken[3] + $4::float8 - b.taken[least((($7::bigint - greatest(excluded.ts - b.ts, 0)) / $6::bigint + 4)::integer, cardinality(b.taken))]), b.taken[3] + $4::float8]
                || array_fill(b.taken[3], ARRAY[((greatest(excluded.ts - b.ts, 0) + $6::bigint - 1) / $6::bigint)::integer])
                || b.taken[4:CASE WHEN cardinality(b.taken) > (($7::bigint - greatest(excluded.ts - b.ts, 0)) / $6::bigint + 4)::integer + 44 THEN (($7::bigint - greatest(excluded.ts - b.ts, 0)) / $6::bigint + 4)::integer ELSE cardinality(b.taken) END] END
    WHERE b.taken[1] = $6::bigint AND b.taken[2] = b.value AND b.taken[3] <= 64 * $5::float8
        AND NOT b.ts > excluded.ts + $11::bigint AND ($12::bigint IS NULL OR b.ts BETWEEN $12::bigint AND $13::bigint)
        AND $5::float8 - CASE WHEN excluded.ts - $7::bigint > b.ts THEN $4::float8
            ELSE b.taken[3] + $4::float8 - b.taken[least((($7::bigint - greatest(excluded.ts - b.ts, 0)) / $6::bigint + 4)::integer, cardinality(b.taken))] END >= $9::float8
    RETURNING b.value, b.ts, b.capacity, b.taken
), refused AS (
    INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity)
    SELECT $1::text, $2::text, $3::integer, 0, 0, 0
    WHERE NOT EXISTS (SELECT FROM take) AND ($12::bigint IS NULL OR coalesce($10::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) BETWEEN $12::bigint AND $13::bigint)
    ON CONFLICT (name, key, shard) DO UPDATE SET value = b.value
    RETURNING b.value, b.ts, b.capacity, b.taken
)
SELECT answer.allowed, answer.value, answer.ts, answer.capacity, answer.taken,
    coalesce($10::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us
FROM (SELECT true AS allowed, value, ts, capacity, taken FROM take UNION ALL SELECT false, value, ts, capacity, taken FROM refused) AS answer
