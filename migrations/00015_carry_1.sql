-- +goose Up
-- carry_1 returns the value and the capacity of the row of a quota under another capacity: what was used stays used. If that is more than
-- the new capacity, nothing is left, but the row still knows what was used. What is owed stays owed, and becomes no more. It reads no table.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.carry_1(p_value float8, p_capacity float8, p_to float8, OUT value float8, OUT capacity float8)
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_used float8 := p_capacity - p_value;
    v_owed float8 := least(p_value, 0);
BEGIN
    IF p_to - v_used >= v_owed THEN
        value := least(p_to - v_used, p_to); capacity := p_to;
    ELSE
        value := v_owed; capacity := v_owed + v_used;
    END IF;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.carry_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.carry_1;
