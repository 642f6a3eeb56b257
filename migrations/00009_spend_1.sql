-- +goose Up
-- spend_1 takes from one row of many buckets of a limit under one policy, from each for itself, in a transaction of its own, at
-- READ COMMITTED. It's take_1 for the calls of a batch: the parameters are those of take_1, with an element for each row in some. The rows
-- are distinct, and in the order of the primary key. Nothing may be owed.
--
-- It returns a row for each bucket, with its place in the arrays, and then perhaps a second one, which doesn't count. If the bucket isn't
-- allowed, value, ts and capacity are as found, and the caller sees whether another policy or another call was the reason. A bucket
-- that has no row is full; it's missing in the answer if the numbers don't hold now.
--
-- Nothing is taken from any bucket if another transaction holds a row for more than 1 ms (SQLSTATE 55P03), or if another call has just made
-- one of the rows (23505). 1 ms is shorter than deadlock_timeout, so no deadlock lasts. A bucket that lacks tokens is neither written nor
-- locked.
--
-- The sub-select hides the length of the array from the planner, which otherwise plans every call again. LATERAL with LIMIT 1, and the
-- LIMIT of the update, which the planner takes for one row, have it look each row up by its key, also with the statistics of a table
-- that was small. For the same reason the name is a column, and is compared with ANY.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.spend_1(
    p_name text, p_keys text[], p_shards integer[], p_costs float8[],
    p_capacity float8, p_rate float8, p_steps float8, p_step_us bigint, p_phases_us bigint[],
    p_since_us bigint, p_until_us bigint, p_as_of_us bigint, p_relaxed boolean)
RETURNS TABLE (ord bigint, allowed boolean, value float8, ts bigint, capacity float8, now_us bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_now   bigint := coalesce(p_as_of_us, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    v_holds boolean := p_since_us IS NULL OR v_now BETWEEN p_since_us AND p_until_us;
    v_all   integer := cardinality(p_keys);
    v_bound text := set_config('lock_timeout', '1ms', true);
    v_rows  integer;
BEGIN
    IF p_relaxed THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    IF v_holds THEN
        RETURN QUERY
        UPDATE ratelimit.buckets AS b SET
            value = least(p_capacity, b.value + ((greatest(a.begun - b.ts, 0) + p_step_us - 1) / p_step_us)::float8 * p_rate / p_steps) - a.cost,
            ts = greatest(b.ts, a.begun),
            capacity = CASE
                WHEN b.capacity = p_capacity THEN p_capacity
                WHEN least(p_capacity, b.value + ((greatest(a.begun - b.ts, 0) + p_step_us - 1) / p_step_us)::float8 * p_rate / p_steps)
                    >= p_capacity THEN p_capacity
                ELSE b.capacity END
        FROM (
            SELECT p_name AS name, u.key, u.shard, u.cost, u.ord, greatest(u.phase_us + (v_now - u.phase_us) / p_step_us * p_step_us, p_since_us) AS begun
            FROM unnest((SELECT p_keys), p_shards, p_costs, p_phases_us) WITH ORDINALITY AS u (key, shard, cost, phase_us, ord)
            WHERE u.cost <= p_capacity
            LIMIT v_all) AS a
        WHERE b.name = ANY (ARRAY[a.name]) AND b.key = a.key AND b.shard = a.shard
            AND (b.value >= a.cost -- which costs little
                OR b.value + ((greatest(a.begun - b.ts, 0) + p_step_us - 1) / p_step_us)::float8 * p_rate / p_steps >= a.cost)
            AND (b.capacity = p_capacity OR p_step_us = 1) AND b.ts <= v_now + 60000000 AND (p_since_us IS NULL OR b.ts BETWEEN p_since_us AND p_until_us)
        RETURNING a.ord, true, b.value, b.ts, b.capacity, v_now;
        GET DIAGNOSTICS v_rows = ROW_COUNT;
        IF v_rows = v_all THEN
            RETURN;
        END IF;
    END IF;

    RETURN QUERY
    WITH rest AS MATERIALIZED (
        SELECT a.ord, a.key, a.shard, b.ts IS NULL AS missing, coalesce(b.value, p_capacity - a.cost) AS value,
            coalesce(b.ts, greatest(a.phase_us + (v_now - a.phase_us) / p_step_us * p_step_us, p_since_us)) AS ts, coalesce(b.capacity, p_capacity) AS capacity
        FROM unnest((SELECT p_keys), p_shards, p_costs, p_phases_us) WITH ORDINALITY AS a (key, shard, cost, phase_us, ord)
        LEFT JOIN LATERAL (
            SELECT r.value, r.ts, r.capacity FROM ratelimit.buckets AS r
            WHERE r.name = p_name AND r.key = a.key AND r.shard = a.shard LIMIT 1) AS b ON true
        WHERE b.ts IS NOT NULL OR v_holds AND a.cost <= p_capacity
    ), made AS (
        INSERT INTO ratelimit.buckets (name, key, shard, value, ts, capacity)
        SELECT p_name, r.key, r.shard, r.value, r.ts, r.capacity FROM rest AS r WHERE r.missing
    )
    SELECT r.ord, r.missing, r.value, r.ts, r.capacity, v_now FROM rest AS r;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.spend_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.spend_1;
