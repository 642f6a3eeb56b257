-- +goose Up
-- reserve_rows_1 reserves tokens of several buckets, all or nothing, or what reserve_1 leaves undecided. It takes them as decide_rows_1 does,
-- and keeps a reservation of them, or takes again for one that is there.
--
-- p_asks                      as in decide_rows_1. All are takes, from different rows, and have also:
--   plan, calendar, waits       as in reserve_1
--   next_us                     when the next windows of a calendar begin; null: windows of one length
-- p_as_of_us .. p_alone       as in decide_rows_1. If p_first is 0 or more, the wait for the first row has a bound, too: 50 ms if p_alone
-- p_id, p_not_before_us .. p_release   as in reserve_1
-- p_state, p_ready_us, p_started_us, p_expires_us   what the caller knows of the reservation that it takes again for; p_state null: a new one
-- p_starts                    whether the work starts at once if it may
--
-- The columns up to held are those of decide_rows_1. allowed is null for all, and nothing was done, where that leaves them undecided.
-- A refusal keeps nothing, or leaves the reservation as it is. In the last row, ready_us is when the work may run.
--
-- If the reservation is not as the caller knows it, nothing was done (SQLSTATE RL004).
--
-- Exact at every isolation level, and without SIREAD locks, like decide_rows_1. The row of a reservation is locked before those of buckets,
-- and stays locked in a caller's transaction. The commit waits for the disk.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.reserve_rows_1(
    p_asks jsonb, p_as_of_us bigint, p_first integer, p_bound_ms integer, p_alone boolean,
    p_id uuid, p_not_before_us bigint, p_stale_us bigint, p_expire_us bigint, p_release boolean,
    p_state text, p_ready_us bigint, p_started_us bigint, p_expires_us bigint, p_starts boolean)
RETURNS TABLE (allowed boolean, value float8, ts bigint, capacity float8, taken float8[], now_us bigint, mended boolean, held boolean, ready_us bigint)
LANGUAGE plpgsql SET extra_float_digits = 1 AS $$
#variable_conflict use_column
DECLARE
    a       record;
    v_first record;
    v_all   boolean := true;
    v_paid  bigint; -- from when on a bucket owes nothing
    v_owed  float8;
    v_ready bigint;
    v_rest  jsonb := '[]';
    n       integer := 0;
BEGIN
    IF p_alone THEN
        PERFORM ratelimit.bound_waits_1('50ms');
    END IF;
    IF p_state IS NOT NULL THEN -- an upsert takes no SIREAD lock
        INSERT INTO ratelimit.reservations AS r (id, ready_us, expires_us, cost, capacity, rate, steps, step_us, phase_us, lowest,
            paid_us, release, state, name, key)
        VALUES (p_id, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, false, 'open', '', '')
        ON CONFLICT (id) DO UPDATE SET state = r.state
        WHERE r.state = p_state AND r.ready_us = p_ready_us AND r.started_us IS NOT DISTINCT FROM p_started_us AND r.expires_us = p_expires_us
        RETURNING r.name INTO v_first;
        IF v_first.name = '' OR NOT FOUND THEN
            RAISE EXCEPTION 'the reservation has changed' USING ERRCODE = 'RL004';
        END IF;
    END IF;

    FOR a IN
        SELECT * FROM ROWS FROM (
            ratelimit.decide_rows_1(p_asks, p_as_of_us, p_first, p_bound_ms, p_alone, false),
            jsonb_to_recordset(p_asks) AS (name text, key text, shard integer, amount float8, lowest float8,
                capacity float8, rate float8, steps float8, step_us bigint, phase_us bigint, plan text, calendar text, waits boolean, next_us bigint[])
        ) AS u (allowed, value, ts, row_capacity, taken, leases, now_us, mended, held, name, key, shard, cost, lowest,
            capacity, rate, steps, step_us, phase_us, plan, calendar, waits, next_us)
    LOOP
        n := n + 1;
        allowed := a.allowed; value := a.value; ts := a.ts; capacity := a.row_capacity; taken := a.taken; now_us := a.now_us; mended := a.mended; held := a.held;
        v_all := v_all AND allowed;
        IF v_all THEN
            v_paid := now_us;
            IF value < 0 AND a.next_us IS NULL THEN
                v_paid := ratelimit.ready_1(value, ts, now_us, a.rate, a.steps, a.step_us, a.phase_us);
            ELSIF value < 0 THEN -- no more is owed than the next window pays
                SELECT min(u.us) INTO v_paid FROM unnest(a.next_us) AS u (us) WHERE u.us > ts;
            END IF;
            v_owed := greatest(-value, 0);
            v_ready := greatest(v_ready, now_us, p_not_before_us, CASE WHEN a.waits THEN v_paid END);
            IF n = 1 THEN
                SELECT a.name, a.key, a.shard, a.plan, a.calendar, a.cost, a.capacity, a.rate, a.steps, a.step_us, a.phase_us, a.lowest,
                    v_paid AS paid_us, v_owed AS owed INTO v_first;
            ELSE
                v_rest := v_rest || jsonb_strip_nulls(jsonb_build_object('name', a.name, 'key', a.key, 'shard', nullif(a.shard, 0), 'plan', a.plan,
                    'calendar', a.calendar, 'cost', a.cost, 'capacity', a.capacity, 'rate', a.rate, 'steps', a.steps, 'step_us', a.step_us,
                    'phase_us', a.phase_us, 'lowest', a.lowest, 'paid_us', v_paid, 'owed', nullif(v_owed, 0)));
            END IF;
            ready_us := v_ready;
        END IF;
        RETURN NEXT;
    END LOOP;
    IF v_all IS NOT TRUE THEN
        RETURN;
    END IF;

    INSERT INTO ratelimit.reservations AS r (id, ready_us, expires_us, stale_us, started_us, cost, capacity, rate, steps, step_us, phase_us, lowest,
        paid_us, owed, shard, release, state, name, key, plan, calendar, others)
    VALUES (p_id, v_ready, v_ready + p_expire_us, v_ready + p_stale_us, CASE WHEN p_starts AND v_ready <= now_us THEN now_us END, v_first.cost,
        v_first.capacity, v_first.rate, v_first.steps, v_first.step_us, v_first.phase_us, v_first.lowest, v_first.paid_us, v_first.owed,
        v_first.shard, p_release, 'open', v_first.name, v_first.key, v_first.plan, v_first.calendar, nullif(v_rest, '[]'))
    ON CONFLICT (id) DO UPDATE SET ready_us = excluded.ready_us, expires_us = excluded.expires_us, stale_us = excluded.stale_us,
        started_us = excluded.started_us, cost = excluded.cost, capacity = excluded.capacity, rate = excluded.rate, steps = excluded.steps,
        step_us = excluded.step_us, phase_us = excluded.phase_us, lowest = excluded.lowest, paid_us = excluded.paid_us, owed = excluded.owed,
        settled = NULL, state = 'open', calendar = excluded.calendar, others = excluded.others
    WHERE p_state IS NOT NULL;
    IF NOT FOUND THEN -- another call has made it
        RAISE EXCEPTION 'the reservation has changed' USING ERRCODE = 'RL004';
    END IF;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.reserve_rows_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.reserve_rows_1;
