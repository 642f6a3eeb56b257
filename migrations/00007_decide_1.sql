-- +goose Up
-- decide_1 takes from one row of several buckets, all or nothing, in the caller's transaction. It's take_1 for each of them: the parameters
-- are those of take_1, with an element for each row. The rows are distinct, and in the order of the primary key, in which every call locks
-- them.
--
-- It returns a row for each bucket, in the order asked: whether the bucket has enough, and its value, ts and capacity. They are those
-- after the decision if all have enough, and otherwise as found. It returns no row, and took nothing, if take_1 leaves one of them
-- undecided.
--
-- Exact at every isolation level, and without SIREAD locks, like take_1. A refusal leaves no row locked, because all is taken in a
-- subtransaction, which a refusal undoes.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.decide_1(
    p_names text[], p_keys text[], p_shards integer[], p_costs float8[],
    p_capacities float8[], p_rates float8[], p_steps float8[], p_step_us bigint[], p_phase_us bigint[], p_lowest float8[],
    p_since_us bigint[], p_until_us bigint[], p_as_of_us bigint)
RETURNS TABLE (allowed boolean, value float8, ts bigint, capacity float8, now_us bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_now      bigint; -- one instant for all rows
    v_row      record;
    v_enough   boolean[];
    v_value    float8[];
    v_ts       bigint[];
    v_capacity float8[];
BEGIN
    FOR v_pass IN 1 .. 2 LOOP
        v_now := coalesce(p_as_of_us, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
        v_enough := '{}';
        BEGIN
            FOR i IN 1 .. cardinality(p_names) LOOP
                v_row := ratelimit.take_1(p_names[i], p_keys[i], p_shards[i], p_costs[i],
                    p_capacities[i], p_rates[i], p_steps[i], p_step_us[i], p_phase_us[i], p_lowest[i],
                    p_since_us[i], p_until_us[i], v_now, false, false);
                IF v_row.allowed IS NULL THEN
                    RAISE SQLSTATE 'RL002';
                END IF;
                v_enough[i] := v_row.allowed; v_value[i] := v_row.value; v_ts[i] := v_row.ts; v_capacity[i] := v_row.capacity;
            END LOOP;
            IF false = ANY (v_enough) THEN
                RAISE SQLSTATE 'RL001';
            END IF;
            EXIT;
        EXCEPTION -- the rows are as before, and unlocked
            WHEN SQLSTATE 'RL001' THEN
                FOR i IN 1 .. cardinality(p_names) LOOP
                    IF v_enough[i] THEN
                        v_value[i] := least(v_value[i] + p_costs[i], p_capacities[i]);
                    END IF;
                END LOOP;
            WHEN SQLSTATE 'RL002' THEN
                RETURN;
        END;
        EXIT WHEN p_as_of_us IS NOT NULL OR clock_timestamp() < timestamptz 'epoch' + (v_now + 10000) * interval '1 microsecond';
    END LOOP; -- it has waited for a row, and tokens have arrived meanwhile
    FOR i IN 1 .. cardinality(p_names) LOOP
        allowed := v_enough[i]; value := v_value[i]; ts := v_ts[i]; capacity := v_capacity[i]; now_us := v_now;
        RETURN NEXT;
    END LOOP;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.decide_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.decide_1;
