-- +goose Up
-- bound_waits_1 bounds how long what follows in the transaction waits for a row: lock_timeout, on every server. Citus passes a change of a
-- setting to its other servers only if it's a SET LOCAL, and if another setting allows that.
--
-- p_most   as lock_timeout has it: milliseconds, or a number with its unit
--
-- A rollback, also to a savepoint, undoes it. It takes no lock.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.bound_waits_1(p_most text)
RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('citus.propagate_set_commands', true) IS NULL THEN -- there is no Citus
        PERFORM set_config('lock_timeout', p_most, true);
    ELSE
        PERFORM set_config('citus.propagate_set_commands', 'local', true);
        EXECUTE format('SET LOCAL lock_timeout TO %L', p_most);
    END IF;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.bound_waits_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.bound_waits_1;
