-- +goose Up
-- start_1 starts the work of a reservation, if it may run. Otherwise it says how long that takes, and keeps the reservation until then.
--
-- p_paused_us                 the end of the pauses of its limits, 0 if there is none; null: unknown, which only a caller can decide on that has
--                             read the reservation
-- p_again                     whether a cancelled reservation is taken again
-- p_keep_us                   how long a reservation is kept for the next attempt, at least
-- p_as_of_us, p_alone         as of take_1
--
-- There is no row if there is no such reservation. done is whether the call is decided: r is the reservation after the call, wait_us how
-- long it takes until the work may run, and restarted whether it was started before. If done is false, nothing was changed: the pauses are
-- unknown, or the tokens must be taken again by reserve_rows_1, because the turn was lost or they were given back. now_us is the instant of the call.
--
-- A call that is alone locks nothing unless it changes the reservation, and waits for that at most 50 ms, as settle_1 does. Another call reads by an
-- upsert, which takes no SIREAD locks, and keeps the reservation locked.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.start_1(p_id uuid, p_paused_us bigint, p_again boolean, p_keep_us bigint, p_as_of_us bigint, p_alone boolean)
RETURNS TABLE (done boolean, wait_us bigint, restarted boolean, now_us bigint, r ratelimit.reservations)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_was     ratelimit.reservations;
    v_started bigint;
    v_expires bigint;
BEGIN
    IF p_alone THEN
        PERFORM ratelimit.bound_waits_1('50ms');
    END IF;
    LOOP
        IF p_alone THEN
            SELECT s.* INTO v_was FROM ratelimit.reservations AS s WHERE s.id = p_id;
        ELSE
            BEGIN
                INSERT INTO ratelimit.reservations AS s (id, ready_us, expires_us, cost, capacity, rate, steps, step_us, phase_us, lowest,
                    paid_us, release, state, name, key)
                VALUES (p_id, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, false, 'open', '', '')
                ON CONFLICT (id) DO UPDATE SET state = s.state
                RETURNING s.* INTO v_was;
                IF v_was.name = '' THEN
                    RAISE SQLSTATE 'RL003';
                END IF;
            EXCEPTION WHEN SQLSTATE 'RL003' THEN -- there is none
                v_was.id := NULL;
            END;
        END IF;
        IF v_was.id IS NULL THEN
            RETURN;
        END IF;
        now_us := coalesce(p_as_of_us, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
        done := true; wait_us := 0; restarted := false; r := v_was;
        v_started := v_was.started_us;
        v_expires := v_was.expires_us;
        IF v_was.state = 'cancelled' AND NOT p_again THEN -- it stays so
        ELSIF p_paused_us IS NULL THEN
            done := false;
        ELSIF p_paused_us > now_us THEN -- it keeps its turn, unless that is lost by then
            wait_us := p_paused_us - now_us;
            restarted := v_started IS NOT NULL;
            v_expires := greatest(v_expires, p_paused_us + p_keep_us);
        ELSIF v_was.state = 'cancelled' OR v_was.state = 'expired' AND v_was.release THEN -- its tokens were given back
            done := false;
        ELSIF v_started IS NOT NULL THEN
            restarted := true;
            v_expires := greatest(v_expires, now_us + p_keep_us);
        ELSIF v_was.state <> 'settled' AND now_us >= v_was.stale_us THEN
            done := false;
        ELSE
            wait_us := greatest(v_was.ready_us - now_us, 0);
            IF wait_us = 0 AND v_was.state <> 'settled' THEN
                v_started := now_us;
            END IF;
        END IF;
        IF v_started IS DISTINCT FROM v_was.started_us OR v_expires <> v_was.expires_us THEN
            IF p_alone THEN
                UPDATE ratelimit.reservations AS s SET started_us = v_started, expires_us = v_expires
                WHERE s.id = p_id AND s.state = v_was.state AND s.ready_us = v_was.ready_us AND s.started_us IS NOT DISTINCT FROM v_was.started_us
                    AND s.expires_us IS NOT DISTINCT FROM v_was.expires_us -- which keeps the plan from the index on it
                RETURNING s.* INTO r;
                CONTINUE WHEN NOT FOUND; -- another call was quicker
            ELSE
                INSERT INTO ratelimit.reservations AS s (id, ready_us, expires_us, cost, capacity, rate, steps, step_us, phase_us, lowest,
                    paid_us, release, state, name, key)
                VALUES (p_id, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, false, 'open', '', '')
                ON CONFLICT (id) DO UPDATE SET started_us = v_started, expires_us = v_expires
                RETURNING s.* INTO r;
            END IF;
        END IF;
        RETURN NEXT;
        RETURN;
    END LOOP;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.start_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.start_1;
