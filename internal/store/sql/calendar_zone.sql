-- Set the time zone up to the end of the transaction, or to the savepoint before it.
--
-- $1 zone
--
-- The zone of the session and no AT TIME ZONE, which takes "CET" for an offset that is the same in summer.
SELECT set_config('TimeZone', $1::text, true)
