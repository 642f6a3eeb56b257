-- Let no statement wait for a lock for more than 20 ms (SQLSTATE 55P03), up to the end of the transaction: one that
-- holds rows and waits for another keeps them from others.
SELECT set_config('lock_timeout', '20ms', true)
