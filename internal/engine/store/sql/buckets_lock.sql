-- Lock a row to the end of the transaction, in front of the statements of a batch, which wait for rows only so long. A row that another
-- transaction is inserting is not there yet, and so the statement does not wait for it.
--
-- $1 name, $2 key, $3 shard
SELECT FROM ratelimit.buckets AS b WHERE b.name = $1 AND b.key = $2 AND b.shard = $3 FOR NO KEY UPDATE
