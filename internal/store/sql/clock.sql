-- The instant to decide at, of the server that is connected to: where rows are on several, all of a call are decided on by
-- the clock of one.
--
-- $1 as_of_us   in place of the database's clock, when it is not null
--
-- Returns now_us.
SELECT coalesce($1::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us
