-- Take from one bucket in a transaction of the statement's own, at READ COMMITTED.
--
-- Parameters as in bucket_take.sql. Returns one row: allowed, value, ts and capacity after the decision, now_us; or none if another
-- transaction inserted the row meanwhile, or if it does not exist and the terms do not hold.
--
-- A look through the snapshot comes first, so that a refusal writes nothing, locks nothing and logs nothing. If it finds enough,
-- take decides on the newest version of the row, under its lock. If another transaction was quicker, the answer is a refusal with
-- the value in the snapshot. The caller sees that this value was enough. At SERIALIZABLE the look would take part in conflict
-- detection, so a caller's transaction uses bucket_take.sql.
WITH seen AS MATERIALIZED (
    SELECT b.value, b.ts, b.capacity FROM ratelimit.buckets AS b WHERE b.name = $1::text AND b.key = $2::text AND b.shard = $3::integer
), begun AS MATERIALIZED (
    SELECT greatest($9::bigint + (coalesce($11::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) - $9::bigint) / $7::bigint * $7::bigint, $13::bigint) AS ts/* durability */
), take AS (
    INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity)
    SELECT $1::text, $2::text, $3::integer, $5::float8 - $4::float8, begun.ts, $5::float8
    FROM begun LEFT JOIN seen ON true
    WHERE ($13::bigint IS NULL OR coalesce($11::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) BETWEEN $13::bigint AND $14::bigint)
        AND (seen.ts IS NULL
            OR least($5::float8, seen.value + ((greatest(begun.ts - seen.ts, 0) + $7::bigint - 1) / $7::bigint)::float8 * $6::float8 / $8::float8) - $4::float8 >= $10::float8 AND ($13::bigint IS NULL OR seen.ts BETWEEN $13::bigint AND $14::bigint)
            AND (seen.capacity = $5::float8 OR $7::bigint = 1))
    ON CONFLICT (name, key, shard) DO UPDATE SET
        value = least($5::float8, b.value + ((greatest(excluded.ts - b.ts, 0) + $7::bigint - 1) / $7::bigint)::float8 * $6::float8 / $8::float8) - $4::float8,
        ts = CASE WHEN b.ts > excluded.ts + $12::bigint AND b.ts > coalesce($11::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) + $12::bigint THEN excluded.ts ELSE greatest(b.ts, excluded.ts) END,
        capacity = CASE WHEN b.capacity = $5::float8 OR least($5::float8, b.value + ((greatest(excluded.ts - b.ts, 0) + $7::bigint - 1) / $7::bigint)::float8 * $6::float8 / $8::float8) >= $5::float8 THEN $5::float8 ELSE b.capacity END
    WHERE least($5::float8, b.value + ((greatest(excluded.ts - b.ts, 0) + $7::bigint - 1) / $7::bigint)::float8 * $6::float8 / $8::float8) - $4::float8 >= $10::float8
        AND ($13::bigint IS NULL OR b.ts BETWEEN $13::bigint AND $14::bigint) AND (b.capacity = $5::float8 OR $7::bigint = 1)
    RETURNING b.value, b.ts, b.capacity
)
SELECT answer.allowed, answer.value, answer.ts, answer.capacity,
    coalesce($11::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us
FROM (SELECT true AS allowed, value, ts, capacity FROM take UNION ALL SELECT false, value, ts, capacity FROM seen WHERE NOT EXISTS (SELECT FROM take)) AS answer
