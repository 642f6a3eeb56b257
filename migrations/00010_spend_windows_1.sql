-- +goose Up
-- spend_windows_1 is spend_1 for sliding windows. p_slices is as in slide_1, and so are the row and what it says.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.spend_windows_1(
    p_name text, p_keys text[], p_shards integer[], p_costs float8[],
    p_capacity float8, p_slices integer, p_step_us bigint, p_phases_us bigint[],
    p_since_us bigint, p_until_us bigint, p_as_of_us bigint, p_relaxed boolean)
RETURNS TABLE (ord bigint, allowed boolean, value float8, ts bigint, capacity float8, taken float8[], now_us bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_now    bigint := coalesce(p_as_of_us, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    v_holds  boolean := p_since_us IS NULL OR v_now BETWEEN p_since_us AND p_until_us;
    v_period bigint := p_slices * p_step_us;
    v_all    integer := cardinality(p_keys);
    v_bound  text := set_config('lock_timeout', '1ms', true);
    v_rows   integer;
BEGIN
    IF p_relaxed THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    IF v_holds THEN
        RETURN QUERY
        UPDATE ratelimit.buckets AS b SET
            value = CASE WHEN b.ts < a.begun - v_period THEN p_capacity - a.cost
                ELSE p_capacity - (b.taken[3] + a.cost
                    - b.taken[least(((v_period - greatest(a.begun - b.ts, 0)) / p_step_us + 4)::integer, cardinality(b.taken))]) END,
            ts = greatest(b.ts, a.begun),
            capacity = p_capacity,
            taken = CASE WHEN b.ts < a.begun - v_period THEN ARRAY[p_step_us, p_capacity - a.cost, a.cost, 0]
                ELSE ARRAY[p_step_us, p_capacity - (b.taken[3] + a.cost
                        - b.taken[least(((v_period - greatest(a.begun - b.ts, 0)) / p_step_us + 4)::integer, cardinality(b.taken))]), b.taken[3] + a.cost]
                    || array_fill(b.taken[3], ARRAY[((greatest(a.begun - b.ts, 0) + p_step_us - 1) / p_step_us)::integer])
                    || b.taken[4:CASE WHEN cardinality(b.taken) > ((v_period - greatest(a.begun - b.ts, 0)) / p_step_us + 4)::integer + 44
                        THEN ((v_period - greatest(a.begun - b.ts, 0)) / p_step_us + 4)::integer ELSE cardinality(b.taken) END] END
        FROM (
            SELECT p_name AS name, u.key, u.shard, u.cost, u.ord, greatest(u.phase_us + (v_now - u.phase_us) / p_step_us * p_step_us, p_since_us) AS begun
            FROM unnest((SELECT p_keys), p_shards, p_costs, p_phases_us) WITH ORDINALITY AS u (key, shard, cost, phase_us, ord)
            WHERE u.cost <= p_capacity
            LIMIT v_all) AS a
        WHERE b.name = ANY (ARRAY[a.name]) AND b.key = a.key AND b.shard = a.shard
            AND b.taken[1] = p_step_us AND b.taken[2] = b.value AND b.taken[3] <= 64 * p_capacity AND b.ts <= a.begun + 60000000
            AND (p_since_us IS NULL OR b.ts BETWEEN p_since_us AND p_until_us)
            AND p_capacity - CASE WHEN b.ts < a.begun - v_period THEN a.cost ELSE b.taken[3] + a.cost
                - b.taken[least(((v_period - greatest(a.begun - b.ts, 0)) / p_step_us + 4)::integer, cardinality(b.taken))] END >= 0
        RETURNING a.ord, true, b.value, b.ts, b.capacity, b.taken, v_now;
        GET DIAGNOSTICS v_rows = ROW_COUNT;
        IF v_rows = v_all THEN
            RETURN;
        END IF;
    END IF;

    RETURN QUERY
    WITH rest AS MATERIALIZED (
        SELECT a.ord, a.key, a.shard, b.ts IS NULL AS missing, coalesce(b.value, p_capacity - a.cost) AS value,
            coalesce(b.ts, greatest(a.phase_us + (v_now - a.phase_us) / p_step_us * p_step_us, p_since_us)) AS ts, coalesce(b.capacity, p_capacity) AS capacity,
            CASE WHEN b.ts IS NULL THEN ARRAY[p_step_us, p_capacity - a.cost, a.cost, 0] ELSE b.taken END AS taken
        FROM unnest((SELECT p_keys), p_shards, p_costs, p_phases_us) WITH ORDINALITY AS a (key, shard, cost, phase_us, ord)
        LEFT JOIN LATERAL (
            SELECT r.value, r.ts, r.capacity, r.taken FROM ratelimit.buckets AS r
            WHERE r.name = p_name AND r.key = a.key AND r.shard = a.shard LIMIT 1) AS b ON true
        WHERE b.ts IS NOT NULL OR v_holds AND a.cost <= p_capacity
    ), made AS (
        INSERT INTO ratelimit.buckets (name, key, shard, value, ts, capacity, taken)
        SELECT p_name, r.key, r.shard, r.value, r.ts, r.capacity, r.taken FROM rest AS r WHERE r.missing
    )
    SELECT r.ord, r.missing, r.value, r.ts, r.capacity, r.taken, v_now FROM rest AS r;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.spend_windows_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.spend_windows_1;
