-- +goose Up
-- slide_1 is take_1 for one row of a sliding window of p_slices slices, each p_step_us long, which begin at p_phase_us + n * p_step_us.
-- buckets.taken begins with the length of a slice and the value. Then it has totals of what was ever taken: up to ts, up to the end of
-- the slice before that of ts, and so on. So what counts is the difference of two totals.
--
-- allowed is also null if taken was written by another kind of limit or with other slices, if its totals have grown so large that they
-- must be reduced to stay exact, or if a wrong clock has written ts. taken is that of the row after the decision.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.slide_1(
    p_name text, p_key text, p_shard integer, p_cost float8,
    p_capacity float8, p_slices integer, p_step_us bigint, p_phase_us bigint, p_lowest float8,
    p_since_us bigint, p_until_us bigint, p_as_of_us bigint, p_alone boolean, p_relaxed boolean,
    OUT allowed boolean, OUT value float8, OUT ts bigint, OUT capacity float8, OUT taken float8[], OUT now_us bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_period bigint := p_slices * p_step_us;
    v_begun  bigint; -- when the slice of now began
BEGIN
    IF p_relaxed THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    FOR v_pass IN 1 .. 2 LOOP -- after the first one the row is locked
        now_us := coalesce(p_as_of_us, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
        IF now_us NOT BETWEEN p_since_us AND p_until_us THEN
            RETURN;
        END IF;
        v_begun := greatest(p_phase_us + (now_us - p_phase_us) / p_step_us * p_step_us, p_since_us);

        IF p_alone THEN
            SELECT b.value, b.ts, b.capacity, b.taken INTO value, ts, capacity, taken
            FROM ratelimit.buckets AS b WHERE b.name = p_name AND b.key = p_key AND b.shard = p_shard;
            IF NOT FOUND THEN
                value := p_capacity; ts := v_begun; capacity := p_capacity; taken := ARRAY[p_step_us, p_capacity, 0, 0];
            ELSIF (taken[1] = p_step_us AND taken[2] = value AND taken[3] <= 64 * p_capacity AND ts <= v_begun + 60000000) IS NOT TRUE
                OR ts NOT BETWEEN p_since_us AND p_until_us THEN
                RETURN;
            END IF;
            IF NOT (p_capacity - CASE WHEN ts < v_begun - v_period THEN p_cost ELSE taken[3] + p_cost
                - taken[least(((v_period - greatest(v_begun - ts, 0)) / p_step_us + 4)::integer, cardinality(taken))] END >= p_lowest) THEN
                allowed := false;
                RETURN;
            END IF;
        END IF;

        -- Totals of slices that have fallen out stay for a while: most writes change only the front of taken, and only that is logged.
        IF p_capacity - p_cost >= p_lowest THEN
            INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity, taken)
            VALUES (p_name, p_key, p_shard, p_capacity - p_cost, v_begun, p_capacity, ARRAY[p_step_us, p_capacity - p_cost, p_cost, 0])
            ON CONFLICT (name, key, shard) DO UPDATE SET
                value = CASE WHEN b.ts < v_begun - v_period THEN excluded.value
                    ELSE p_capacity - (b.taken[3] + p_cost - b.taken[least(((v_period - greatest(v_begun - b.ts, 0)) / p_step_us + 4)::integer, cardinality(b.taken))]) END,
                ts = greatest(b.ts, v_begun),
                capacity = p_capacity,
                taken = CASE WHEN b.ts < v_begun - v_period THEN excluded.taken
                    ELSE ARRAY[p_step_us, p_capacity - (b.taken[3] + p_cost - b.taken[least(((v_period - greatest(v_begun - b.ts, 0)) / p_step_us + 4)::integer, cardinality(b.taken))]), b.taken[3] + p_cost]
                        || array_fill(b.taken[3], ARRAY[((greatest(v_begun - b.ts, 0) + p_step_us - 1) / p_step_us)::integer])
                        || b.taken[4:CASE WHEN cardinality(b.taken) > ((v_period - greatest(v_begun - b.ts, 0)) / p_step_us + 4)::integer + 44
                            THEN ((v_period - greatest(v_begun - b.ts, 0)) / p_step_us + 4)::integer ELSE cardinality(b.taken) END] END
            WHERE b.taken[1] = p_step_us AND b.taken[2] = b.value AND b.taken[3] <= 64 * p_capacity AND b.ts <= v_begun + 60000000
                AND (p_since_us IS NULL OR b.ts BETWEEN p_since_us AND p_until_us)
                AND p_capacity - CASE WHEN b.ts < v_begun - v_period THEN p_cost ELSE b.taken[3] + p_cost
                    - b.taken[least(((v_period - greatest(v_begun - b.ts, 0)) / p_step_us + 4)::integer, cardinality(b.taken))] END >= p_lowest
            RETURNING b.value, b.ts, b.capacity, b.taken INTO value, ts, capacity, taken;
            IF FOUND THEN
                allowed := true;
                RETURN;
            END IF;
        END IF;

        -- The row is locked. A call that is alone looks at it again.
        IF NOT p_alone THEN
            INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity) VALUES (p_name, p_key, p_shard, p_capacity, v_begun, p_capacity)
            ON CONFLICT (name, key, shard) DO UPDATE SET value = b.value
            RETURNING b.value, b.ts, b.capacity, b.taken INTO value, ts, capacity, taken;
            IF taken[1] = p_step_us AND taken[2] = value AND taken[3] <= 64 * p_capacity AND ts <= v_begun + 60000000
                AND (p_since_us IS NULL OR ts BETWEEN p_since_us AND p_until_us) THEN
                IF v_pass = 1 AND p_as_of_us IS NULL THEN -- as in take_1
                    now_us := (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;
                    v_begun := greatest(p_phase_us + (now_us - p_phase_us) / p_step_us * p_step_us, p_since_us);
                    CONTINUE WHEN now_us NOT BETWEEN p_since_us AND p_until_us
                        OR p_capacity - CASE WHEN ts < v_begun - v_period THEN p_cost ELSE taken[3] + p_cost
                            - taken[least(((v_period - greatest(v_begun - ts, 0)) / p_step_us + 4)::integer, cardinality(taken))] END >= p_lowest;
                END IF;
                allowed := false;
            END IF;
            RETURN;
        END IF;
    END LOOP;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.slide_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.slide_1;
