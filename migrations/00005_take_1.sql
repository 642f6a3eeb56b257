-- +goose Up
-- take_1 takes p_cost tokens from one row of a token bucket, a fixed window or a calendar window, or refuses. The functions of this schema
-- are how all programs decide. A function never changes once it was released: a change is another function with the next number. So
-- programs of different versions can use one row, because each decides on its newest version, under its lock.
--
-- p_capacity, p_lowest          tokens: the most that the bucket holds, and the least that may remain: 0, or minus what may be owed
-- p_rate, p_steps               p_rate / p_steps tokens arrive with every step
-- p_step_us, p_phase_us         steps begin at p_phase_us + n * p_step_us. A token bucket has steps of 1 us, a window is a step
-- p_since_us, p_until_us        the first and the last instant at which these numbers hold; null: they always do
-- p_as_of_us                    the instant to decide at; null: the clock of the server
-- p_alone                       whether the call is a transaction of its own, at READ COMMITTED
-- p_relaxed                     whether the commit of that transaction needs not wait for the disk
--
-- allowed is null, and nothing was taken, if the numbers don't hold at the instant, or if the row was written under others or by a wrong
-- clock, more than a minute ahead: decide_rows_1 decides then. value, ts and capacity are those of the row after the decision. If allowed
-- is null, ts is that of the row, or null if the row wasn't read. now_us is the instant of the decision.
--
-- Exact at every isolation level. A call that is not alone reads through no snapshot, so it takes no SIREAD lock and causes no
-- serialization failure between different rows. It keeps the row locked to the end of the transaction, also if it refuses. A call that is
-- alone writes only what it takes, so a refusal locks and logs nothing. A rollback undoes either.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.take_1(
    p_name text, p_key text, p_shard integer, p_cost float8,
    p_capacity float8, p_rate float8, p_steps float8, p_step_us bigint, p_phase_us bigint, p_lowest float8,
    p_since_us bigint, p_until_us bigint, p_as_of_us bigint, p_alone boolean, p_relaxed boolean,
    OUT allowed boolean, OUT value float8, OUT ts bigint, OUT capacity float8, OUT now_us bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_begun bigint; -- when the step of now began
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
            -- Mostly there is a row, which has enough.
            UPDATE ratelimit.buckets AS b SET
                value = least(p_capacity, b.value + ((greatest(v_begun - b.ts, 0) + p_step_us - 1) / p_step_us)::float8 * p_rate / p_steps) - p_cost,
                ts = greatest(b.ts, v_begun),
                capacity = CASE
                    WHEN b.capacity = p_capacity THEN p_capacity
                    WHEN least(p_capacity, b.value + ((greatest(v_begun - b.ts, 0) + p_step_us - 1) / p_step_us)::float8 * p_rate / p_steps) >= p_capacity THEN p_capacity
                    ELSE b.capacity END
            WHERE b.name = p_name AND b.key = p_key AND b.shard = p_shard
                AND least(p_capacity, b.value + ((greatest(v_begun - b.ts, 0) + p_step_us - 1) / p_step_us)::float8 * p_rate / p_steps) - p_cost >= p_lowest
                AND (p_since_us IS NULL OR b.ts BETWEEN p_since_us AND p_until_us)
                AND (b.capacity = p_capacity OR p_step_us = 1)
                AND b.ts <= now_us + 60000000
            RETURNING b.value, b.ts, b.capacity INTO value, ts, capacity;
            IF FOUND THEN
                allowed := true;
                RETURN;
            END IF;

            SELECT b.value, b.ts, b.capacity INTO value, ts, capacity
            FROM ratelimit.buckets AS b WHERE b.name = p_name AND b.key = p_key AND b.shard = p_shard;
            IF NOT FOUND THEN
                value := p_capacity; ts := v_begun; capacity := p_capacity;
            ELSIF ts NOT BETWEEN p_since_us AND p_until_us OR capacity <> p_capacity AND p_step_us > 1 OR ts > now_us + 60000000 THEN
                RETURN;
            END IF;
            IF NOT least(p_capacity, value + ((greatest(v_begun - ts, 0) + p_step_us - 1) / p_step_us)::float8 * p_rate / p_steps) - p_cost >= p_lowest THEN
                allowed := false;
                RETURN;
            END IF;
        END IF;

        -- A row that is missing is full.
        IF p_capacity - p_cost >= p_lowest THEN
            INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity)
            VALUES (p_name, p_key, p_shard, p_capacity - p_cost, v_begun, p_capacity)
            ON CONFLICT (name, key, shard) DO UPDATE SET
                value = least(p_capacity, b.value + ((greatest(v_begun - b.ts, 0) + p_step_us - 1) / p_step_us)::float8 * p_rate / p_steps) - p_cost,
                ts = greatest(b.ts, v_begun),
                capacity = CASE
                    WHEN b.capacity = p_capacity THEN p_capacity
                    WHEN least(p_capacity, b.value + ((greatest(v_begun - b.ts, 0) + p_step_us - 1) / p_step_us)::float8 * p_rate / p_steps) >= p_capacity THEN p_capacity
                    ELSE b.capacity END
            WHERE least(p_capacity, b.value + ((greatest(v_begun - b.ts, 0) + p_step_us - 1) / p_step_us)::float8 * p_rate / p_steps) - p_cost >= p_lowest
                AND (p_since_us IS NULL OR b.ts BETWEEN p_since_us AND p_until_us)
                AND (b.capacity = p_capacity OR p_step_us = 1)
                AND b.ts <= now_us + 60000000
            RETURNING b.value, b.ts, b.capacity INTO value, ts, capacity;
            IF FOUND THEN
                allowed := true;
                RETURN;
            END IF;
        END IF;

        -- The row is locked, whatever it holds. It is read by a write, because a SELECT would read through the snapshot.
        IF NOT p_alone THEN
            INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity) VALUES (p_name, p_key, p_shard, p_capacity, v_begun, p_capacity)
            ON CONFLICT (name, key, shard) DO UPDATE SET value = b.value
            RETURNING b.value, b.ts, b.capacity INTO value, ts, capacity;
            IF (ts NOT BETWEEN p_since_us AND p_until_us OR capacity <> p_capacity AND p_step_us > 1 OR ts > now_us + 60000000) IS NOT TRUE THEN
                IF v_pass = 1 AND p_as_of_us IS NULL THEN -- it may have waited for the lock, and tokens have arrived meanwhile
                    now_us := (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;
                    v_begun := greatest(p_phase_us + (now_us - p_phase_us) / p_step_us * p_step_us, p_since_us);
                    CONTINUE WHEN now_us NOT BETWEEN p_since_us AND p_until_us
                        OR least(p_capacity, value + ((greatest(v_begun - ts, 0) + p_step_us - 1) / p_step_us)::float8 * p_rate / p_steps) - p_cost >= p_lowest;
                END IF;
                allowed := false;
            END IF;
            RETURN;
        END IF;
    END LOOP;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.take_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.take_1;
