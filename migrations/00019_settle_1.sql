-- +goose Up
-- settle_1 ends an open reservation of one bucket, and charges or gives back the difference to what it took, once, however often it is
-- called.
--
-- p_final                     'settled', 'cancelled', or 'expired' in a call that is alone, of a reservation past its end
-- p_name, p_key               the bucket that the caller means; null: whichever it is
-- p_cost                      what the work cost in the end; null: what was reserved
-- p_charges                   whether it may cost more than was reserved: not if the limit is off
-- p_own                       whether the terms in the reservation decide. Else the next ones do, those that the limit has now:
-- p_capacity .. p_until_us    as of take_1; p_capacity null: unknown
-- p_reset_us                  what was taken before then was given back by a policy that filled the buckets
-- p_windows                   whether the terms are those of a calendar
-- p_as_of_us                  as of take_1
-- p_wait_ms                   null in a caller's transaction. Otherwise the call is alone, as in take_1, or one of several in a message. Then it waits
--                             for a row at most so long, and is undecided if that is not enough: the other calls go on
--
-- state is that before the call; null: there is no such reservation, or a call that is alone sees none. done is whether the call is decided: the reservation has ended, now if
-- state is open, with amount as the difference. If done is false, nothing was changed, and the caller decides on locked rows: there are
-- other buckets, the terms are unknown or don't hold now, or the row of the bucket is of another policy, of a later window or of a
-- wrong clock. name to plan are those of the bucket; if an open reservation has several, name is null.
--
-- A surplus is given back to the window in which it was paid, and only until that ends: more is never in the bucket than its capacity, or
-- that of the reservation. Whether the window has ended is seen behind the lock of the row.
--
-- Exact at every isolation level, and without SIREAD locks: a call that is not alone reads by upserts. The reservation is locked before the
-- row of the bucket. The sub-block undoes a call that is undecided, or that has inserted a row for an unknown id.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.settle_1(
    p_id uuid, p_final text, p_name text, p_key text, p_cost float8, p_charges boolean, p_own boolean,
    p_capacity float8, p_rate float8, p_steps float8, p_step_us bigint, p_phase_us bigint,
    p_since_us bigint, p_until_us bigint, p_reset_us bigint, p_windows boolean, p_as_of_us bigint, p_wait_ms integer,
    OUT done boolean, OUT state text, OUT amount float8, OUT name text, OUT key text, OUT shard integer, OUT plan text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_now     bigint := coalesce(p_as_of_us, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    v_begun   bigint; -- when the step of now began
    v_until   bigint; -- when the last step begins that takes tokens back
    v_due     float8; -- to charge; below 0: to give back
    v_each    float8;
    v_windows float8;
    v_left    float8;
    v_was     record;
BEGIN
    IF p_wait_ms IS NOT NULL THEN
        PERFORM ratelimit.bound_waits_1(p_wait_ms::text);
    END IF;
    BEGIN
        IF p_wait_ms IS NOT NULL THEN
            UPDATE ratelimit.reservations AS r SET state = p_final, expires_us = greatest(r.expires_us, v_now),
                settled = CASE WHEN p_final = 'settled' THEN coalesce(CASE WHEN p_charges THEN p_cost ELSE least(p_cost, r.cost) END, r.cost) END
            WHERE r.id = p_id AND r.state = 'open' AND r.others IS NULL AND (p_cost IS NULL OR p_own OR p_capacity IS NOT NULL)
                AND (p_name IS NULL OR r.name = p_name AND r.key = p_key) AND (p_final <> 'expired' OR r.expires_us + 0 < v_now)
            RETURNING r.* INTO v_was;
        ELSE
            INSERT INTO ratelimit.reservations AS r (id, ready_us, expires_us, cost, capacity, rate, steps, step_us, phase_us, lowest,
                paid_us, release, state, name, key)
            VALUES (p_id, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, false, 'open', '', '')
            ON CONFLICT (id) DO UPDATE SET state = p_final, expires_us = greatest(r.expires_us, v_now),
                settled = CASE WHEN p_final = 'settled' THEN coalesce(CASE WHEN p_charges THEN p_cost ELSE least(p_cost, r.cost) END, r.cost) END
            WHERE r.state = 'open' AND r.others IS NULL AND (p_cost IS NULL OR p_own OR p_capacity IS NOT NULL)
                AND (p_name IS NULL OR r.name = p_name AND r.key = p_key)
            RETURNING r.* INTO v_was;
            IF v_was.name = '' THEN
                RAISE SQLSTATE 'RL003';
            END IF;
        END IF;

        IF FOUND THEN
            done := true; state := 'open'; name := v_was.name; key := v_was.key; shard := v_was.shard; plan := v_was.plan;
            amount := CASE WHEN p_cost IS NULL THEN 0 WHEN p_charges THEN p_cost - v_was.cost ELSE least(p_cost, v_was.cost) - v_was.cost END;
            IF amount = 0 THEN
                RETURN;
            END IF;
            IF p_own THEN
                p_capacity := v_was.capacity; p_rate := v_was.rate; p_steps := v_was.steps; p_step_us := v_was.step_us; p_phase_us := v_was.phase_us;
            END IF;
            v_due := amount;
            v_now := coalesce(p_as_of_us, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
            v_begun := greatest(p_phase_us + (v_now - p_phase_us) / p_step_us * p_step_us, p_since_us);
            IF v_now NOT BETWEEN p_since_us AND p_until_us OR p_own AND v_was.calendar IS NOT NULL
                OR p_windows AND amount < 0 AND v_was.paid_us NOT BETWEEN p_since_us AND p_until_us THEN
                RAISE SQLSTATE 'RL002';
            END IF;

            -- What was owed is paid by the windows, oldest first. Each window gives back what it has paid.
            IF v_due < 0 AND v_was.owed <> 0 AND v_was.step_us > 1 AND p_step_us > 1 THEN
                v_each := v_was.rate / v_was.steps;
                v_windows := ceil(v_was.owed / v_each);
                v_left := ceil((v_was.paid_us - v_now)::float8 / v_was.step_us::float8);
                IF v_left < v_windows THEN
                    v_due := greatest(v_due,
                        -greatest(0, least(v_was.cost, v_was.capacity + v_was.owed - (v_windows - greatest(v_left, 0)) * v_each)));
                END IF;
            END IF;

            IF v_due > 0 THEN
                INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity)
                VALUES (v_was.name, v_was.key, v_was.shard, p_capacity - v_due, v_begun, p_capacity)
                ON CONFLICT (name, key, shard) DO UPDATE SET
                    value = least(p_capacity, b.value + ((greatest(v_begun - b.ts, 0) + p_step_us - 1) / p_step_us)::float8 * p_rate / p_steps) - v_due,
                    ts = greatest(b.ts, v_begun),
                    capacity = CASE
                        WHEN b.capacity = p_capacity THEN p_capacity
                        WHEN least(p_capacity, b.value + ((greatest(v_begun - b.ts, 0) + p_step_us - 1) / p_step_us)::float8 * p_rate / p_steps) >= p_capacity THEN p_capacity
                        ELSE b.capacity END
                WHERE (p_since_us IS NULL OR b.ts BETWEEN p_since_us AND p_until_us)
                    AND (b.capacity = p_capacity OR p_step_us = 1) AND b.ts <= v_now + 60000000;
            ELSIF v_due < 0 THEN
                v_until := p_phase_us + (v_was.paid_us - p_phase_us) / p_step_us * p_step_us;
                IF v_until < p_since_us AND v_until + p_step_us > p_since_us THEN -- the terms began in this window
                    v_until := p_since_us;
                END IF;
                IF v_was.paid_us < p_reset_us OR p_step_us > 1 AND v_begun > v_until THEN
                    IF p_until_us IS NOT NULL THEN -- its row may be of a later policy
                        RAISE SQLSTATE 'RL002';
                    END IF;
                    RETURN;
                END IF;
                -- A row that is missing was full under all terms, and long ago.
                INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity)
                VALUES (v_was.name, v_was.key, v_was.shard,
                    CASE WHEN p_step_us > 1 THEN p_capacity ELSE greatest(p_capacity, v_was.capacity) END, least(v_begun, -2208988800000000),
                    CASE WHEN p_step_us > 1 THEN p_capacity ELSE greatest(p_capacity, v_was.capacity) END)
                ON CONFLICT (name, key, shard) DO UPDATE SET value = least(greatest(p_capacity, v_was.capacity, b.value), b.value - v_due)
                WHERE (p_since_us IS NULL OR b.ts BETWEEN p_since_us AND p_until_us)
                    AND (p_step_us = 1 OR b.capacity = p_capacity AND b.ts < v_begun + p_step_us) AND b.ts <= v_now + 60000000;
            END IF;
            IF NOT FOUND THEN
                RAISE SQLSTATE 'RL002';
            END IF;
            RETURN;
        END IF;

        IF p_wait_ms IS NOT NULL THEN
            SELECT r.state, CASE WHEN r.others IS NULL OR r.state <> 'open' THEN r.name END, r.key, r.shard, r.plan
            INTO state, name, key, shard, plan FROM ratelimit.reservations AS r WHERE r.id = p_id;
        ELSE
            INSERT INTO ratelimit.reservations AS r (id, ready_us, expires_us, cost, capacity, rate, steps, step_us, phase_us, lowest,
                paid_us, release, state, name, key)
            VALUES (p_id, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, false, 'open', '', '')
            ON CONFLICT (id) DO UPDATE SET state = r.state
            RETURNING r.state, CASE WHEN r.others IS NULL OR r.state <> 'open' THEN r.name END, r.key, r.shard, r.plan
            INTO state, name, key, shard, plan;
            IF name = '' THEN -- it was deleted meanwhile
                RAISE SQLSTATE 'RL003';
            END IF;
        END IF;
        done := coalesce(state <> 'open' AND (state <> p_final OR p_name IS NULL OR name = p_name AND key = p_key), false);
    EXCEPTION
        WHEN SQLSTATE 'RL002' THEN
            done := false;
        WHEN SQLSTATE 'RL003' THEN
            done := true; state := NULL;
        WHEN lock_not_available THEN
            IF p_wait_ms IS NULL THEN
                RAISE;
            END IF;
            done := false;
    END;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.settle_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.settle_1;
