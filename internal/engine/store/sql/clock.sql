-- The instant to decide at, of the server that is connected to: where rows are on several, all of a call are decided on by
-- the clock of one. It stays in a setting up to the end of the transaction, for statements behind it.
--
-- $1 as_of_us   in place of the database's clock, when it is not null
--
-- Returns now_us.
SELECT set_config('ratelimit.now_us', (coalesce($1::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint))::text, true)::bigint AS now_us
