-- +goose Up
-- release_set_1 is release_1 for the calls of a batch, in a transaction of its own, at READ COMMITTED, without terms that hold for a time.
--
-- p_names, p_keys, p_fences     the leases
-- p_waits                       whether to wait for a row; all leases are of one bucket then
--
-- It returns a row for each lease that was held, with its place. The others don't change.
--
-- Nothing is given back if another transaction holds a row for more than 1 ms (SQLSTATE 55P03), except with p_waits. See spend_1 for the form
-- of the statement. A call that takes slots, and finds that a lease has ended, holds its bucket and waits for the lease: so this waits for
-- the bucket in vain, and the slots are not given back twice.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.release_set_1(p_names text[], p_keys text[], p_fences bigint[], p_as_of_us bigint, p_waits boolean)
RETURNS TABLE (ord bigint, now_us bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_all integer := cardinality(p_keys);
    v_now bigint;
BEGIN
    IF p_waits THEN -- the clock is read behind the lock
        PERFORM FROM ratelimit.buckets AS b WHERE b.name = p_names[1] AND b.key = p_keys[1] AND b.shard = 0 FOR NO KEY UPDATE;
    ELSE
        PERFORM set_config('lock_timeout', '1ms', true);
    END IF;
    v_now := coalesce(p_as_of_us, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    RETURN QUERY
    WITH ended AS (
        DELETE FROM ratelimit.leases AS l
        USING (
            SELECT u.name, u.key, u.fence, u.ord
            FROM unnest((SELECT p_names), p_keys, p_fences) WITH ORDINALITY AS u (name, key, fence, ord)
            LIMIT v_all) AS a
        WHERE l.name = ANY (ARRAY[a.name]) AND l.key = a.key AND l.fence = a.fence AND l.until_us > v_now AND l.slots > 0
        RETURNING a.ord, l.name, l.key, l.slots
    ), given AS (
        UPDATE ratelimit.buckets AS b SET
            value = b.value + s.slots,
            ts = greatest(b.ts, v_now),
            leased = CASE WHEN b.value + s.slots < b.capacity THEN b.leased ELSE b.leased[: 1] END
        FROM (
            SELECT e.name, e.key, 0 AS shard, sum(e.slots)::float8 AS slots FROM ended AS e GROUP BY e.name, e.key ORDER BY e.name, e.key
            LIMIT v_all) AS s
        WHERE b.name = ANY (ARRAY[s.name]) AND b.key = s.key AND b.shard = s.shard
        RETURNING b.name, b.key
    )
    SELECT e.ord, v_now FROM ended AS e JOIN given AS g ON g.name = e.name AND g.key = e.key;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.release_set_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.release_set_1;
