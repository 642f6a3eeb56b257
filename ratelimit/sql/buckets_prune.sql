-- Delete the full buckets of one limit from a range of the table's blocks: a bucket without a row is full.
--
-- $1 name, $2 capacity, $3 rate, $4 step_us, $5 steps    the limit's terms
-- $6 first, $7 last                                      the blocks, last not included
-- $8 idle_us                                             how long a bucket must have been left alone
-- $9 as_of_us                                            null: the database's clock
--
-- Full means full at the latest idle_us ago, so that a clock that steps back by less finds no difference.
-- Rows somebody holds are skipped, and a row that changed since the snapshot is tested again under its lock.
-- The range is read by TID, so no index on ts is needed, which would cost every update its HOT.
DELETE FROM ratelimit.buckets WHERE ctid = ANY (ARRAY(
    SELECT b.ctid
    FROM ratelimit.buckets AS b,
        (SELECT coalesce($9::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) - $8::bigint AS us) AS until
    WHERE b.ctid >= format('(%s,0)', $6::bigint)::tid AND b.ctid < format('(%s,0)', $7::bigint)::tid
        AND b.name = $1::text
        AND b.ts <= until.us
        AND b.value + ((until.us - b.ts) / $4::bigint)::float8 * $3::float8 / $5::float8 >= $2::float8
    FOR UPDATE OF b SKIP LOCKED))
