-- Change a setting to the end of the transaction.
--
-- $1 its name, $2 its value
SELECT set_config($1::text, $2::text, true)
