-- Take from one sliding window in a transaction of the statement's own, at READ COMMITTED.
--
-- Parameters as in window_take.sql. Returns one row: allowed, value, ts, capacity and taken after the decision, now_us; or none if another
-- transaction inserted the row meanwhile, or if it does not exist and the terms do not hold.
--
-- seen and take are the two of bucket_take_alone.sql: a refusal writes nothing, locks nothing and logs nothing.
WITH seen AS MATERIALIZED (
    SELECT b.value, b.ts, b.capacity, b.taken FROM ratelimit.buckets AS b WHERE b.name = $1::text AND b.key = $2::text AND b.shard = $3::integer
), begun AS MATERIALIZED (
    SELECT greatest($8::bigint + (coalesce($10::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) - $8::bigint) / $6::bigint * $6::bigint, $12::bigint) AS ts/* durability */
), take AS (
    INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity, taken)
    SELECT $1::text, $2::text, $3::integer, $5::float8 - $4::float8, begun.ts, $5::float8,
        ARRAY[$6::bigint, $5::float8 - $4::float8, $4::float8, 0]
    FROM begun LEFT JOIN seen ON true
    WHERE ($12::bigint IS NULL OR coalesce($10::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) BETWEEN $12::bigint AND $13::bigint)
        AND (seen.ts IS NULL
            OR seen.taken[1] = $6::bigint AND seen.taken[2] = seen.value AND seen.taken[3] <= 64 * $5::float8
        AND NOT seen.ts > begun.ts + $11::bigint AND ($12::bigint IS NULL OR seen.ts BETWEEN $12::bigint AND $13::bigint)
        AND $5::float8 - CASE WHEN begun.ts - $7::bigint > seen.ts THEN $4::float8
            ELSE seen.taken[3] + $4::float8 - seen.taken[least((($7::bigint - greatest(begun.ts - seen.ts, 0)) / $6::bigint + 4)::integer, cardinality(seen.taken))] END >= $9::float8)
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
)
SELECT answer.allowed, answer.value, answer.ts, answer.capacity, answer.taken,
    coalesce($10::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us
FROM (SELECT true AS allowed, value, ts, capacity, taken FROM take UNION ALL SELECT false, value, ts, capacity, taken FROM seen WHERE NOT EXISTS (SELECT FROM take)) AS answer
