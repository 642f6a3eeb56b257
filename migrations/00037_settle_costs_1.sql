-- +goose Up
-- settle_costs_1 ends an open reservation of several buckets as settle_1 ends one of a single bucket, once, however often it is called.
--
-- p_final     as in settle_1
-- p_costs     is an array of objects, one for each bucket whose cost isn't as reserved. All others keep theirs, or, if p_final isn't
--             'settled', the call is undecided:
--   name, key   the bucket
--   cost        what the work cost in the end
--   free        whether it may not cost more than was reserved
--   own         whether the terms in the reservation decide. Else the next ones do, those that the limit has now:
--   capacity, rate, steps, slices, step_us, phase_us, since_us, last_us   as in decide_rows_1
--   reset_us, windows   as in settle_1
-- p_as_of_us, p_wait_ms   as in settle_1
--
-- done and state are as in settle_1. If the call has ended the reservation, names, keys and amounts are those of all its buckets. The call is
-- also undecided if decide_rows_1 would need to know the policy before, or must mend a row: the caller then uses settle_rows_1.
--
-- Exact at every isolation level, and without SIREAD locks, like decide_rows_1. The reservation is locked before the rows of the buckets.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.settle_costs_1(p_id uuid, p_final text, p_costs jsonb, p_as_of_us bigint, p_wait_ms integer,
    OUT done boolean, OUT state text, OUT names text[], OUT keys text[], OUT amounts float8[])
LANGUAGE plpgsql SET extra_float_digits = 1 AS $$
#variable_conflict use_column
DECLARE
    v_now     bigint := coalesce(p_as_of_us, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    v_was     record;
    a         record;
    b         record;
    v_due     float8; -- to charge; below 0: to give back
    v_until   bigint; -- when the last step begins that takes tokens back
    v_each    float8;
    v_windows float8;
    v_left    float8;
    v_asks    jsonb := '[]';
    v_named   integer := 0;
BEGIN
    IF p_wait_ms IS NOT NULL THEN
        PERFORM ratelimit.bound_waits_1(p_wait_ms::text);
    END IF;
    BEGIN
        INSERT INTO ratelimit.reservations AS r (id, ready_us, expires_us, cost, capacity, rate, steps, step_us, phase_us, lowest,
            paid_us, release, state, name, key)
        VALUES (p_id, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, false, 'open', '', '')
        ON CONFLICT (id) DO UPDATE SET state = p_final, expires_us = greatest(r.expires_us, v_now),
            settled = CASE WHEN p_final = 'settled' THEN coalesce((
                SELECT CASE WHEN c.free THEN least(c.cost, r.cost) ELSE c.cost END
                FROM jsonb_to_recordset(p_costs) AS c (name text, key text, cost float8, free boolean)
                WHERE c.name = r.name AND c.key = r.key), r.cost) END,
            others = CASE WHEN p_final = 'settled' THEN (
                SELECT jsonb_agg(o.bucket || jsonb_build_object('settled', coalesce((
                    SELECT CASE WHEN c.free THEN least(c.cost, (o.bucket ->> 'cost')::float8) ELSE c.cost END
                    FROM jsonb_to_recordset(p_costs) AS c (name text, key text, cost float8, free boolean)
                    WHERE c.name = o.bucket ->> 'name' AND c.key = o.bucket ->> 'key'), (o.bucket ->> 'cost')::float8)) ORDER BY o.n)
                FROM jsonb_array_elements(r.others) WITH ORDINALITY AS o (bucket, n))
                ELSE r.others END
        WHERE r.state = 'open' AND (p_final <> 'expired' OR r.expires_us + 0 < v_now)
        RETURNING r.* INTO v_was;
        IF v_was.name = '' THEN
            RAISE SQLSTATE 'RL003';
        END IF;

        IF NOT FOUND THEN
            INSERT INTO ratelimit.reservations AS r (id, ready_us, expires_us, cost, capacity, rate, steps, step_us, phase_us, lowest,
                paid_us, release, state, name, key)
            VALUES (p_id, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, false, 'open', '', '')
            ON CONFLICT (id) DO UPDATE SET state = r.state
            RETURNING r.state, r.name, r.key, r.others INTO v_was;
            IF v_was.name = '' THEN -- it was deleted meanwhile
                RAISE SQLSTATE 'RL003';
            END IF;
            state := v_was.state;
            done := state NOT IN ('open', p_final) OR state = p_final AND (p_final <> 'settled' OR NOT EXISTS (
                SELECT FROM jsonb_to_recordset(p_costs) AS c (name text, key text)
                WHERE (c.name, c.key) IS DISTINCT FROM (v_was.name, v_was.key)
                    AND NOT coalesce(v_was.others, '[]') @> jsonb_build_array(jsonb_build_object('name', c.name, 'key', c.key))));
            RETURN;
        END IF;

        done := true; state := 'open'; names := '{}'; keys := '{}'; amounts := '{}';
        v_now := coalesce(p_as_of_us, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
        FOR b IN
            SELECT u.*, c.* FROM ROWS FROM (
                jsonb_to_recordset(jsonb_build_array(to_jsonb(v_was) - 'others') || coalesce(v_was.others, '[]')) AS (
                    name text, key text, shard integer, calendar text, cost float8, settled float8, capacity float8, rate float8, steps float8,
                    step_us bigint, phase_us bigint, paid_us bigint, owed float8)
            ) WITH ORDINALITY AS u (name, key, shard, calendar, cost, settled, was_capacity, was_rate, was_steps, was_step_us, was_phase_us, paid_us, owed, n)
            LEFT JOIN ROWS FROM (
                jsonb_array_elements(p_costs),
                jsonb_to_recordset(p_costs) AS (name text, key text, own boolean, capacity float8, slices integer, step_us bigint, phase_us bigint,
                    since_us bigint, last_us bigint, reset_us bigint, windows boolean)
            ) AS c (terms, c_name, c_key, own, capacity, slices, step_us, phase_us, since_us, last_us, reset_us, windows)
                ON c_name = u.name AND c_key = u.key
            ORDER BY u.n
        LOOP
            v_due := CASE WHEN p_final = 'settled' THEN b.settled ELSE 0 END - b.cost;
            names := names || b.name; keys := keys || b.key; amounts := amounts || v_due;
            v_named := v_named + (b.terms IS NOT NULL)::integer;
            IF b.shard <> 0 THEN
                RAISE SQLSTATE 'RL002';
            END IF;
            CONTINUE WHEN v_due = 0;
            IF b.own THEN
                b.terms := jsonb_build_object('name', b.name, 'key', b.key, 'capacity', b.was_capacity, 'rate', b.was_rate, 'steps', b.was_steps,
                    'step_us', b.was_step_us, 'phase_us', b.was_phase_us);
                b.capacity := b.was_capacity; b.step_us := b.was_step_us; b.phase_us := b.was_phase_us;
            END IF;
            IF b.capacity IS NULL OR v_now NOT BETWEEN b.since_us AND b.last_us OR b.own AND b.calendar IS NOT NULL
                OR (b.windows OR b.slices > 0) AND v_due < 0 AND b.paid_us NOT BETWEEN b.since_us AND b.last_us THEN
                RAISE SQLSTATE 'RL002';
            END IF;

            -- As settle_1 has it.
            IF v_due < 0 AND b.owed <> 0 AND b.was_step_us > 1 AND b.step_us > 1 THEN
                v_each := b.was_rate / b.was_steps;
                v_windows := ceil(b.owed / v_each);
                v_left := ceil((b.paid_us - v_now)::float8 / b.was_step_us::float8);
                IF v_left < v_windows THEN
                    v_due := greatest(v_due, -greatest(0, least(b.cost, b.was_capacity + b.owed - (v_windows - greatest(v_left, 0)) * v_each)));
                    CONTINUE WHEN v_due = 0;
                END IF;
            END IF;
            v_until := 9223372036854775807;
            IF b.paid_us < b.reset_us THEN
                v_until := -9223372036854775808;
            ELSIF b.step_us > 1 THEN
                v_until := b.phase_us + (b.paid_us - b.phase_us) / b.step_us * b.step_us;
                IF v_until < b.since_us AND v_until + b.step_us > b.since_us THEN -- the terms began in this window
                    v_until := b.since_us;
                END IF;
            END IF;
            v_asks := v_asks || (b.terms || jsonb_build_object('shard', 0, 'verb', CASE WHEN v_due < 0 THEN 'credit' ELSE 'charge' END,
                'amount', abs(v_due), 'most', b.was_capacity, 'until_us', v_until));
        END LOOP;
        IF v_named <> jsonb_array_length(p_costs) THEN -- it's for a bucket that was not reserved
            RAISE SQLSTATE 'RL002';
        END IF;
        IF v_asks <> '[]' THEN
            FOR a IN SELECT d.allowed, d.mended FROM ratelimit.decide_rows_1(v_asks, p_as_of_us,
                CASE WHEN p_wait_ms IS NOT NULL THEN 1 END, least(p_wait_ms, 2), p_wait_ms IS NOT NULL, false) AS d
            LOOP
                IF a.allowed IS NULL OR a.mended THEN
                    RAISE SQLSTATE 'RL002';
                END IF;
            END LOOP;
        END IF;
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
REVOKE EXECUTE ON FUNCTION ratelimit.settle_costs_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.settle_costs_1;
