-- +goose Up
-- prune_rows_1 deletes the full buckets of one limit from a range of blocks of the table, with their ended leases: a bucket without a row is
-- full. It's for a table that Citus distributes, where each server has such blocks.
--
-- p_name
-- p_capacities, p_rates, p_step_us, p_steps   the terms of each policy that the name is used under, as in take_1
-- p_first, p_end                              the blocks, the last not included
-- p_idle_us, p_as_of_us                       for how long a bucket must have been full, and the present instant; null: the server's clock
--
-- done is whether there is no row in a later block. Rows that another transaction holds are left, and each is tested again under its lock.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.prune_rows_1(
    p_name text, p_capacities float8[], p_rates float8[], p_step_us bigint[], p_steps float8[], p_first bigint, p_end bigint,
    p_idle_us bigint, p_as_of_us bigint,
    OUT deleted bigint, OUT done boolean)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_first tid := format('(%s,0)', p_first);
    v_end   tid := format('(%s,0)', p_end);
    v_until bigint := coalesce(p_as_of_us, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) - p_idle_us;
    v_row   record;
BEGIN
    deleted := 0;
    FOR v_row IN
        SELECT b.key, b.shard, b.leased FROM ratelimit.buckets AS b
        WHERE b.ctid >= v_first AND b.ctid < v_end AND b.name || '' = p_name -- by which no plan goes through the index
            AND ratelimit.spare_1(b.value, b.ts, b.capacity, b.taken, b.leased, v_until, p_capacities, p_rates, p_step_us, p_steps)
    LOOP
        PERFORM FROM ratelimit.buckets AS b
        WHERE b.name = p_name AND b.key = v_row.key AND b.shard = v_row.shard
            AND ratelimit.spare_1(b.value, b.ts, b.capacity, b.taken, b.leased, v_until, p_capacities, p_rates, p_step_us, p_steps)
        FOR UPDATE SKIP LOCKED;
        IF FOUND THEN
            DELETE FROM ratelimit.buckets AS b WHERE b.name = p_name AND b.key = v_row.key AND b.shard = v_row.shard;
            deleted := deleted + 1;
            IF v_row.leased[1] IS NOT NULL THEN
                DELETE FROM ratelimit.leases AS l WHERE l.name = p_name AND l.key = v_row.key;
            END IF;
        END IF;
    END LOOP;
    PERFORM FROM ratelimit.buckets AS b WHERE b.ctid >= v_end LIMIT 1;
    done := NOT FOUND;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.prune_rows_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.prune_rows_1;
