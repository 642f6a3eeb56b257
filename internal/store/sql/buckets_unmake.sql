-- Delete rows that buckets_lock.sql made in this transaction for a call that was refused: they are full, which a
-- bucket without a row is, too.
--
-- $1 name[], $2 key[], $3 shard[]   the rows
--
-- Each is looked up by itself, as in spend_1, and no other transaction has seen it. It is found by its TID,
-- as in buckets_prune.sql.
DELETE FROM ratelimit.buckets AS d
WHERE d.ctid = ANY (ARRAY(
        SELECT b.ctid
        FROM unnest((SELECT $1::text[]), $2::text[], $3::integer[]) AS a (name, key, shard),
            LATERAL (SELECT r.ctid FROM ratelimit.buckets AS r WHERE r.name = a.name AND r.key = a.key AND r.shard = a.shard LIMIT 1) AS b))
