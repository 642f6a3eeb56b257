-- +goose Up
-- decide_groups_1 takes from the rows of several groups, from each group all or nothing, in a transaction of its own, at READ COMMITTED. A
-- group is a call over several limits, or several calls that share a bucket. The parameters are those of take_1, with an element for
-- each row. The rows are distinct, and in the order of the primary key, in which every call locks them. p_groups says which go together.
--
-- Returns a row for each bucket: its place in the arrays, and whether its group was given. Then value, ts and capacity are those after
-- the decision. Otherwise they are as found, null without a row, and enough is whether they suffice. enough is null if take_1 would leave
-- the row undecided. If all rows of a group have enough, and it wasn't given, another transaction was in the way.
--
-- It looks first, so a group that lacks tokens writes and locks nothing. Then it takes from the rows of the other groups as they are by
-- then. If another call was quicker, it begins again, up to three times. If another transaction holds a row for more than 1 ms,
-- nothing is taken: it holds other rows meanwhile.
--
-- The sub-select hides the length of the array from the planner, which otherwise plans every call again; an unnest of all arrays costs more
-- than their subscripts. LATERAL with LIMIT 1, and the
-- LIMIT of the update, which the planner takes for one row, have it look each row up by its key, also with the statistics of a table
-- that was small. For the same reason the name is compared with ANY.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.decide_groups_1(
    p_groups integer[], p_names text[], p_keys text[], p_shards integer[], p_costs float8[],
    p_capacities float8[], p_rates float8[], p_steps float8[], p_step_us bigint[], p_phase_us bigint[], p_lowest float8[],
    p_since_us bigint[], p_until_us bigint[], p_as_of_us bigint, p_relaxed boolean)
RETURNS TABLE (ord bigint, given boolean, enough boolean, value float8, ts bigint, capacity float8, now_us bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_now      bigint := coalesce(p_as_of_us, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    v_bound    text := set_config('lock_timeout', '1ms', true);
    v_seen     record;    -- arrays of what the look found
    v_refused  integer[]; -- the groups that aren't given
    v_asked    integer;   -- how many rows the others have
    v_ord      bigint[];
    v_value    float8[];
    v_ts       bigint[];
    v_capacity float8[];
BEGIN
    IF p_relaxed THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    FOR v_attempt IN 1 .. 3 LOOP
        SELECT array_agg(s.ord) AS ord, array_agg(s.grp) AS grp, array_agg(s.enough) AS enough,
            array_agg(s.value) AS value, array_agg(s.ts) AS ts, array_agg(s.capacity) AS capacity,
            array_agg(s.ord) FILTER (WHERE s.ts IS NULL) AS missing, coalesce(array_agg(s.grp) FILTER (WHERE s.enough IS NOT TRUE), '{}') AS refused
        INTO v_seen
        FROM (
            SELECT a.ord, a.grp, b.value, b.ts, b.capacity, CASE
                WHEN v_now NOT BETWEEN a.since_us AND a.until_us OR b.ts NOT BETWEEN a.since_us AND a.until_us
                    OR b.capacity <> a.capacity AND a.step_us > 1 OR b.ts > v_now + 60000000 THEN NULL
                ELSE a.capacity - a.cost >= a.lowest AND (b.ts IS NULL
                    OR b.value - a.cost >= a.lowest -- which costs little
                    OR b.value + ((greatest(a.begun - b.ts, 0) + a.step_us - 1) / a.step_us)::float8 * a.rate / a.steps - a.cost >= a.lowest) END AS enough
            FROM (
                SELECT u.grp, u.ord, p_names[u.ord] AS name, p_keys[u.ord] AS key, p_shards[u.ord] AS shard, p_costs[u.ord] AS cost,
                    p_capacities[u.ord] AS capacity, p_rates[u.ord] AS rate, p_steps[u.ord] AS steps, p_step_us[u.ord] AS step_us,
                    p_lowest[u.ord] AS lowest, p_since_us[u.ord] AS since_us, p_until_us[u.ord] AS until_us,
                    greatest(p_phase_us[u.ord] + (v_now - p_phase_us[u.ord]) / p_step_us[u.ord] * p_step_us[u.ord], p_since_us[u.ord]) AS begun
                FROM unnest((SELECT p_groups)) WITH ORDINALITY AS u (grp, ord)
                OFFSET 0) AS a
            LEFT JOIN LATERAL (
                SELECT r.value, r.ts, r.capacity FROM ratelimit.buckets AS r
                WHERE r.name = a.name AND r.key = a.key AND r.shard = a.shard LIMIT 1) AS b ON true) AS s;
        v_refused := v_seen.refused;
        EXIT WHEN v_refused <> '{}' AND (SELECT bool_and(grp = ANY (v_refused)) FROM unnest(p_groups) AS grp);
        BEGIN
            WITH asked AS MATERIALIZED (
                SELECT u.grp, u.ord, p_names[u.ord] AS name, p_keys[u.ord] AS key, p_shards[u.ord] AS shard, p_costs[u.ord] AS cost,
                    p_capacities[u.ord] AS capacity, p_rates[u.ord] AS rate, p_steps[u.ord] AS steps, p_step_us[u.ord] AS step_us,
                    p_lowest[u.ord] AS lowest, p_since_us[u.ord] AS since_us, p_until_us[u.ord] AS until_us,
                    greatest(p_phase_us[u.ord] + (v_now - p_phase_us[u.ord]) / p_step_us[u.ord] * p_step_us[u.ord], p_since_us[u.ord]) AS begun
                FROM unnest((SELECT p_groups)) WITH ORDINALITY AS u (grp, ord)
                WHERE u.grp <> ALL (v_refused)
            ), given AS (
                UPDATE ratelimit.buckets AS b SET
                    value = least(a.capacity, b.value + ((greatest(a.begun - b.ts, 0) + a.step_us - 1) / a.step_us)::float8 * a.rate / a.steps) - a.cost,
                    ts = greatest(b.ts, a.begun),
                    capacity = CASE
                        WHEN b.capacity = a.capacity THEN a.capacity
                        WHEN least(a.capacity, b.value + ((greatest(a.begun - b.ts, 0) + a.step_us - 1) / a.step_us)::float8 * a.rate / a.steps)
                            >= a.capacity THEN a.capacity
                        ELSE b.capacity END
                FROM (SELECT * FROM asked LIMIT (SELECT cardinality(p_groups))) AS a
                WHERE b.name = ANY (ARRAY[a.name]) AND b.key = a.key AND b.shard = a.shard
                    AND (b.value - a.cost >= a.lowest
                        OR b.value + ((greatest(a.begun - b.ts, 0) + a.step_us - 1) / a.step_us)::float8 * a.rate / a.steps - a.cost >= a.lowest)
                    AND (b.capacity = a.capacity OR a.step_us = 1) AND b.ts <= v_now + 60000000 AND (a.since_us IS NULL OR b.ts BETWEEN a.since_us AND a.until_us)
                RETURNING a.ord, b.value, b.ts, b.capacity
            ), made AS (
                INSERT INTO ratelimit.buckets (name, key, shard, value, ts, capacity)
                SELECT a.name, a.key, a.shard, a.capacity - a.cost, a.begun, a.capacity FROM asked AS a WHERE a.ord = ANY (v_seen.missing)
            )
            SELECT (SELECT count(*) FROM asked), array_agg(g.ord), array_agg(g.value), array_agg(g.ts), array_agg(g.capacity)
            INTO v_asked, v_ord, v_value, v_ts, v_capacity
            FROM (
                SELECT * FROM given
                UNION ALL
                SELECT a.ord, a.capacity - a.cost, a.begun, a.capacity FROM asked AS a WHERE a.ord = ANY (v_seen.missing)) AS g;
            IF v_asked > coalesce(cardinality(v_ord), 0) THEN
                RAISE SQLSTATE 'RL001';
            END IF;
            RETURN QUERY SELECT u.ord, true, true, u.value, u.ts, u.capacity, v_now
            FROM unnest(v_ord, v_value, v_ts, v_capacity) AS u (ord, value, ts, capacity);
            EXIT;
        EXCEPTION -- by which nothing was taken
            WHEN SQLSTATE 'RL001' OR unique_violation THEN
                v_refused := p_groups;
            WHEN lock_not_available THEN
                v_refused := p_groups;
                EXIT;
        END;
    END LOOP;
    IF v_refused <> '{}' THEN
        RETURN QUERY SELECT u.ord, false, u.enough, u.value, u.ts, u.capacity, v_now
        FROM unnest(v_seen.ord, v_seen.grp, v_seen.enough, v_seen.value, v_seen.ts, v_seen.capacity) AS u (ord, grp, enough, value, ts, capacity)
        WHERE u.grp = ANY (v_refused);
    END IF;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.decide_groups_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.decide_groups_1;
