-- +goose Up
-- read_rows_1 reads rows of buckets without locking or changing them, each by itself, as Citus wants it where it distributes them. So it
-- reads each at READ COMMITTED as it is then. Elsewhere one statement reads all of them.
--
-- p_names, p_keys, p_shards   the rows
-- p_as_of_us                  the instant to report as now; null: the clock of the server that is connected to
--
-- It returns a row for each of them, in the order asked: value, ts and capacity (null: no row, a full bucket), taken, and leases: the last
-- fencing number, and then number, end and slots of each lease. filtered is whether row level security applies to the role, so that a row
-- may be there and not seen.
--
-- In a SERIALIZABLE transaction it takes SIREAD locks, as every read does.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.read_rows_1(p_names text[], p_keys text[], p_shards integer[], p_as_of_us bigint)
RETURNS TABLE (value float8, ts bigint, capacity float8, taken float8[], leases bigint[], now_us bigint, filtered boolean)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    now_us := coalesce(p_as_of_us, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    filtered := row_security_active('ratelimit.buckets');
    FOR i IN 1 .. cardinality(p_keys) LOOP
        SELECT b.value, b.ts, b.capacity, b.taken,
            CASE WHEN b.leased[1] IS NOT NULL THEN b.leased[1] || ARRAY(
                SELECT u.n FROM ratelimit.leases AS l, unnest(ARRAY[l.fence, l.until_us, l.slots]) WITH ORDINALITY AS u (n, place)
                WHERE l.name = p_names[i] AND l.key = p_keys[i] AND l.slots > 0 ORDER BY l.fence, u.place) END
        INTO value, ts, capacity, taken, leases
        FROM ratelimit.buckets AS b WHERE b.name = p_names[i] AND b.key = p_keys[i] AND b.shard = p_shards[i];
        RETURN NEXT;
    END LOOP;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.read_rows_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.read_rows_1;
