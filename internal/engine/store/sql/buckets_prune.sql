-- Delete the full buckets of one limit from a range of blocks of the table, with their ended leases: a bucket without a row is full.
--
-- $1 name
-- $2 capacity[], $3 rate[], $4 step_us[], $5 steps[]   the terms of each policy that the name is used under
-- $6 first, $7 last                                    the blocks, last not included
-- $8 idle_us                                           how long a bucket must have been left alone
-- $9 as_of_us                                          null: the database's clock
--
-- Leases without slots go too, which SERIALIZABLE transactions leave. Full means full under each of the policies, at the latest idle_us ago, so that a clock that steps back by less finds no
-- difference. The last take from a sliding window may be as late as the end of the slice of ts. Locked rows are skipped, and a row
-- that changed since the snapshot is tested again under its lock. The range is read by TID, so no index on ts is needed, which
-- would prevent HOT updates. DELETE finds a row by its TID, so that no plan reads the whole table: the row is locked,
-- so no other has that TID.
WITH spare AS MATERIALIZED (
    SELECT b.ctid AS at, b.name, b.key, b.leased
    FROM ratelimit.buckets AS b,
        (SELECT coalesce($9::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) - $8::bigint AS us) AS until,
        LATERAL (SELECT b.ts + coalesce(b.taken[1], 0)::bigint AS us) AS since
    WHERE b.ctid >= format('(%s,0)', $6::bigint)::tid AND b.ctid < format('(%s,0)', $7::bigint)::tid
        AND b.name || '' = $1::text -- by which no plan goes through the index to all rows of the name
        AND b.ts <= until.us AND (greatest(b.leased[1], b.leased[3]) > until.us) IS NOT TRUE
        AND (SELECT bool_and(CASE WHEN t.step_us > 1 AND b.capacity > t.capacity THEN greatest(least(b.value, 0), b.value + t.capacity - b.capacity) ELSE b.value END + ((until.us - since.us) / t.step_us)::float8 * t.rate / t.steps >= t.capacity)
            FROM unnest($2::float8[], $3::float8[], $4::bigint[], $5::float8[]) AS t (capacity, rate, step_us, steps))
    FOR UPDATE OF b SKIP LOCKED
), ended AS (
    DELETE FROM ratelimit.leases AS l
    WHERE l.ctid = ANY (ARRAY(
        SELECT r.ctid FROM spare AS s, LATERAL (
            SELECT o.ctid FROM ratelimit.leases AS o WHERE o.name = s.name AND o.key = s.key ORDER BY o.fence LIMIT 1000000) AS r
        WHERE s.leased[1] IS NOT NULL
        UNION ALL
        SELECT o.ctid FROM (
            SELECT e.ctid FROM ratelimit.leases AS e WHERE e.name = $1::text AND e.slots = 0 LIMIT 1000 FOR UPDATE SKIP LOCKED) AS o))
)
DELETE FROM ratelimit.buckets AS d
WHERE d.ctid = ANY (ARRAY(SELECT s.at FROM spare AS s))
