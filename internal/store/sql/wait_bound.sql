-- Let no statement wait for a lock for longer (SQLSTATE 55P03), up to the end of the transaction: one that holds rows
-- and waits for another keeps them from others.
--
-- $1 how long, as lock_timeout has it
SELECT set_config('lock_timeout', $1::text, true)
