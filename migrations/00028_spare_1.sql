-- +goose Up
-- spare_1 reports whether a row was full at an instant under each of several policies, so that it may be deleted. It reads no table.
--
-- p_value, p_ts, p_capacity, p_taken, p_leased   columns of the row
-- p_until_us                                     the instant
-- p_capacities, p_rates, p_step_us, p_steps      the policies, as in take_1
--
-- The last take from a sliding window may be as late as the end of the slice of ts.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.spare_1(
    p_value float8, p_ts bigint, p_capacity float8, p_taken float8[], p_leased bigint[], p_until_us bigint,
    p_capacities float8[], p_rates float8[], p_step_us bigint[], p_steps float8[])
RETURNS boolean
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_passed bigint := p_until_us - p_ts - coalesce(p_taken[1], 0)::bigint;
BEGIN
    IF p_ts > p_until_us OR greatest(p_leased[1], p_leased[3]) > p_until_us THEN
        RETURN false;
    END IF;
    RETURN (
        SELECT bool_and(CASE
            WHEN t.step_us > 1 AND p_capacity > t.capacity THEN greatest(least(p_value, 0), p_value + t.capacity - p_capacity)
            ELSE p_value END + (v_passed / t.step_us)::float8 * t.rate / t.steps >= t.capacity)
        FROM unnest(p_capacities, p_rates, p_step_us, p_steps) AS t (capacity, rate, step_us, steps));
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.spare_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.spare_1;
