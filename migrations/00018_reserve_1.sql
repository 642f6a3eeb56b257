-- +goose Up
-- reserve_1 takes as take_1 does, and keeps a reservation of the tokens: the row of the bucket, the terms that decided, and the instants
-- at which the work may run, is stale and expires. The parameters up to p_alone are those of take_1, and value to now_us are its answer.
--
-- p_id                        of the reservation, a new one
-- p_plan, p_calendar          the plan of the key, and the stored form of the windows of a calendar; null: none
-- p_not_before_us             the work may not run before that; 0: at any time
-- p_stale_us, p_expire_us     how long after it is ready the work has lost its turn (null: never), and the reservation ends by itself
-- p_release                   whether that gives back what it took
-- p_waits                     whether the work waits for the tokens; false: the limit delays nothing
--
-- allowed is null, and nothing was taken or kept, where take_1 leaves the call undecided, and if tokens of a calendar window would be owed:
-- the windows that repay them may have another length. ready_us is when the work may run. A refusal keeps nothing.
--
-- Exact at every isolation level, and without SIREAD locks, like take_1. A call that is alone waits for a row at most 50 ms (SQLSTATE
-- 55P03), because its caller waits for it even if its context ends: what was reserved must not be unknown. Its commit waits for the disk.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.reserve_1(
    p_id uuid, p_name text, p_key text, p_shard integer, p_cost float8,
    p_capacity float8, p_rate float8, p_steps float8, p_step_us bigint, p_phase_us bigint, p_lowest float8,
    p_since_us bigint, p_until_us bigint, p_as_of_us bigint, p_alone boolean,
    p_plan text, p_calendar text, p_not_before_us bigint, p_stale_us bigint, p_expire_us bigint, p_release boolean, p_waits boolean,
    OUT allowed boolean, OUT value float8, OUT ts bigint, OUT capacity float8, OUT now_us bigint, OUT ready_us bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_least float8 := CASE WHEN p_calendar IS NULL THEN p_lowest ELSE greatest(p_lowest, 0) END;
    v_took  record;
    v_paid  bigint; -- from when on the bucket owes nothing
BEGIN
    IF p_alone THEN
        PERFORM ratelimit.bound_waits_1('50ms');
    END IF;
    v_took := ratelimit.take_1(p_name, p_key, p_shard, p_cost, p_capacity, p_rate, p_steps, p_step_us, p_phase_us, v_least,
        p_since_us, p_until_us, p_as_of_us, p_alone, false);
    allowed := v_took.allowed; value := v_took.value; ts := v_took.ts; capacity := v_took.capacity; now_us := v_took.now_us;
    IF NOT allowed AND v_least <> p_lowest THEN
        allowed := NULL;
    END IF;
    IF allowed IS NOT TRUE THEN
        RETURN;
    END IF;

    v_paid := now_us;
    IF value < 0 THEN
        v_paid := ratelimit.ready_1(value, ts, now_us, p_rate, p_steps, p_step_us, p_phase_us);
    END IF;
    ready_us := greatest(now_us, p_not_before_us, CASE WHEN p_waits THEN v_paid END);
    INSERT INTO ratelimit.reservations (id, ready_us, expires_us, stale_us, cost, capacity, rate, steps, step_us, phase_us, lowest,
        paid_us, owed, shard, release, state, name, key, plan, calendar)
    VALUES (p_id, ready_us, ready_us + p_expire_us, ready_us + p_stale_us, p_cost, p_capacity, p_rate, p_steps, p_step_us, p_phase_us, p_lowest,
        v_paid, greatest(-value, 0), p_shard, p_release, 'open', p_name, p_key, p_plan, p_calendar);
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.reserve_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.reserve_1;
