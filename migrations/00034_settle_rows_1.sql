-- +goose Up
-- settle_rows_1 ends reservations, and changes buckets as decide_rows_1 does, all or nothing. It's for reservations of several buckets,
-- and for what settle_1 leaves undecided: the caller has read the reservations, and knows what their ends charge and give back.
--
-- p_ends     is an array of objects, in the order in which the rows of reservations are locked:
--   id, ready_us, paid_us, owed, others   an open reservation, as the caller has read it
--   state, settled, rest      how it ends, and settled and others after that
--   now_us                    when it ends. It's kept from then on, at least
-- p_asks     as in decide_rows_1, none of them a take; null: no bucket changes
-- p_as_of_us .. p_alone       as in decide_rows_1. A call that is alone waits for a reservation, and for the first row, at most 50 ms
--
-- It returns what decide_rows_1 does. If allowed is null, nothing was done.
--
-- If a reservation is not open, or not as the caller knows it, nothing was done (SQLSTATE RL004).
--
-- Exact at every isolation level, and without SIREAD locks, like decide_rows_1. The rows of reservations are locked before those of buckets.
-- A rollback undoes all. The commit waits for the disk.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.settle_rows_1(p_ends jsonb, p_asks jsonb, p_as_of_us bigint, p_first integer, p_bound_ms integer, p_alone boolean)
RETURNS TABLE (allowed boolean, value float8, ts bigint, capacity float8, taken float8[], now_us bigint, mended boolean, held boolean)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    e      record;
    a      record;
    v_name text;
BEGIN
    IF p_alone THEN
        PERFORM ratelimit.bound_waits_1('50ms');
    END IF;
    BEGIN
        FOR e IN SELECT * FROM jsonb_to_recordset(p_ends) AS u (id uuid, ready_us bigint, paid_us bigint, owed float8, others jsonb,
            state text, settled float8, rest jsonb, now_us bigint)
        LOOP -- by upserts, which take no SIREAD locks
            INSERT INTO ratelimit.reservations AS r (id, ready_us, expires_us, cost, capacity, rate, steps, step_us, phase_us, lowest,
                paid_us, release, state, name, key)
            VALUES (e.id, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, false, 'open', '', '')
            ON CONFLICT (id) DO UPDATE SET state = e.state, expires_us = greatest(r.expires_us, e.now_us), settled = e.settled, others = e.rest
            WHERE r.state = 'open' AND r.ready_us = e.ready_us AND r.paid_us = e.paid_us AND r.owed = e.owed AND r.others IS NOT DISTINCT FROM e.others
            RETURNING r.name INTO v_name;
            IF v_name = '' OR NOT FOUND THEN
                RAISE EXCEPTION 'the reservation has changed' USING ERRCODE = 'RL004';
            END IF;
        END LOOP;
        IF p_asks IS NULL THEN
            RETURN;
        END IF;

        FOR a IN SELECT * FROM ratelimit.decide_rows_1(p_asks, p_as_of_us, p_first, p_bound_ms, p_alone, false) LOOP
            allowed := a.allowed; value := a.value; ts := a.ts; capacity := a.capacity; taken := a.taken; now_us := a.now_us; mended := a.mended;
            held := a.held;
            RETURN NEXT;
        END LOOP;
        IF allowed IS NULL THEN
            RAISE SQLSTATE 'RL002';
        END IF;
    EXCEPTION
        WHEN SQLSTATE 'RL002' THEN -- what was found has been returned
            RETURN;
    END;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.settle_rows_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.settle_rows_1;
