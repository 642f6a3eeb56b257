-- +goose Up
-- totals_1 returns the totals of a sliding window at an instant, for the totals of a row as slide_1 keeps them. They may count slices of
-- another length: then the tokens of an old slice go to the slice that holds its end, so that they count no shorter. Totals that have
-- grown large are reduced, so that they stay exact. It reads no table.
--
-- p_totals, p_length_us, p_ts_us  the totals of the row, the length of their slices, and an instant in the newest of them
-- p_capacity, p_slices, p_step_us, p_phase_us, p_now_us  the window, as in slide_1, and the instant
-- p_scale                         by how much the totals change, because another policy begins at the instant; null: none does
--
-- ts is an instant in the slice of the first total.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.totals_1(
    p_totals float8[], p_length_us bigint, p_ts_us bigint,
    p_capacity float8, p_slices integer, p_step_us bigint, p_phase_us bigint, p_now_us bigint, p_scale float8,
    OUT totals float8[], OUT ts bigint)
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_latest bigint := greatest(p_ts_us, p_now_us);
    v_newest bigint; -- the begin of the newest slice
    v_bin    bigint;
    v_passed bigint; -- slices that have begun since
    v_less   float8;
BEGIN
    totals := p_totals;
    ts := p_ts_us;
    IF p_length_us <> p_step_us THEN
        totals := ARRAY[0, 0];
        FOR i IN 0 .. cardinality(p_totals) - 2 LOOP
            v_bin := least(p_phase_us + ((p_ts_us - p_phase_us) / p_length_us + 1 - i) * p_length_us - 1, v_latest); -- the end of a slice
            v_bin := p_phase_us + (v_bin - p_phase_us) / p_step_us * p_step_us;
            v_newest := coalesce(v_newest, v_bin);
            v_bin := (v_newest - v_bin) / p_step_us;
            EXIT WHEN v_bin > p_slices;
            IF cardinality(totals) < v_bin + 2 THEN
                totals := totals || array_fill(0::float8, ARRAY[(v_bin + 2 - cardinality(totals))::integer]);
            END IF;
            totals[v_bin + 1] := totals[v_bin + 1] + (p_totals[i + 1] - p_totals[i + 2]);
        END LOOP;
        FOR i IN REVERSE cardinality(totals) - 1 .. 1 LOOP
            totals[i] := totals[i] + totals[i + 1];
        END LOOP;
        ts := greatest(v_newest, p_ts_us);
    END IF;
    IF p_scale IS NOT NULL THEN
        FOR i IN 1 .. cardinality(totals) LOOP
            totals[i] := totals[i] * p_scale;
        END LOOP;
    ELSIF totals[1] > 64 * p_capacity THEN
        v_less := totals[least(p_slices + 2, cardinality(totals))] + totals[1] - totals[1]; -- a multiple of the precision of the largest
        totals := totals[: least(p_slices + 2, cardinality(totals))];
        FOR i IN 1 .. cardinality(totals) LOOP
            totals[i] := totals[i] - v_less;
        END LOOP;
    END IF;
    v_passed := (p_phase_us + (p_now_us - p_phase_us) / p_step_us * p_step_us - (p_phase_us + (ts - p_phase_us) / p_step_us * p_step_us)) / p_step_us;
    IF v_passed > p_slices THEN
        totals := ARRAY[0, 0];
    ELSE
        v_passed := greatest(v_passed, 0);
        IF cardinality(totals) > p_slices + 2 - v_passed + 44 THEN
            totals := totals[: p_slices + 2 - v_passed];
        END IF;
        totals := array_fill(totals[1], ARRAY[v_passed::integer]) || totals;
    END IF;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.totals_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.totals_1;
