-- +goose Up
-- ready_1 returns the instant from which a bucket owes nothing any more, to the microsecond, if no other call changes it. Its row has
-- p_value tokens at p_ts, which is not before the step of p_now_us began. The other parameters are those of take_1. No wait is longer than
-- 250 years.
--
-- The division says how many steps it takes, but for roundings; the loops correct these. All tokens are counted as take_1 counts them.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.ready_1(
    p_value float8, p_ts bigint, p_now_us bigint, p_rate float8, p_steps float8, p_step_us bigint, p_phase_us bigint)
RETURNS bigint
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    c_longest CONSTANT bigint := 7884000000000000;
    v_most    bigint := c_longest / p_step_us + 2;
    v_steps   bigint := 1;
BEGIN
    IF p_value >= 0 THEN
        RETURN p_now_us;
    END IF;
    v_steps := least(greatest(ceil(-p_value * p_steps / p_rate), 1), v_most)::bigint;
    WHILE v_steps > 1 AND p_value + (v_steps - 1)::float8 * p_rate / p_steps >= 0 LOOP
        v_steps := v_steps - 1;
    END LOOP;
    WHILE v_steps < v_most AND p_value + v_steps::float8 * p_rate / p_steps < 0 LOOP
        v_steps := v_steps + 1;
    END LOOP;
    IF v_steps = v_most THEN
        RETURN p_now_us + c_longest;
    END IF;
    RETURN least(p_phase_us + (p_ts - p_phase_us) / p_step_us * p_step_us + v_steps * p_step_us, p_now_us + c_longest);
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.ready_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.ready_1;
