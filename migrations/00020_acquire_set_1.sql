-- +goose Up
-- acquire_set_1 takes leases on slots of many buckets of a limit under one policy, for the calls of a batch, in a transaction of its own, at
-- READ COMMITTED. It's acquire_1 for each call, if all slots that the calls for its bucket want are free.
--
-- p_keys, p_sums, p_counts      the buckets, distinct and in the order of the primary key, and how many slots and leases the calls for each want
-- p_places, p_slots, p_nths     the calls: the place of each one's bucket, its slots, and how many earlier calls are for that bucket
-- p_waits                       whether to wait for a row; p_keys is one key then
--
-- It returns a row for each bucket, with its place, and then perhaps a second one, which doesn't count. If the bucket is allowed, value, ts and capacity are those after all its calls, fence is
-- the number of the first lease, each further one has a number that is higher by 65,536, and last_us is the last end of all leases. Otherwise
-- nothing was taken from it, and value, ts, capacity and leases are as found. No bucket is in the answer if the policy doesn't hold now.
--
-- Nothing is taken from any bucket if another transaction holds a row for more than 1 ms (SQLSTATE 55P03), except with
-- p_waits, or if another call has just made one of the rows (23505). See spend_1 for
-- the form of the statements.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.acquire_set_1(
    p_name text, p_keys text[], p_sums float8[], p_counts bigint[], p_places bigint[], p_slots bigint[], p_nths bigint[],
    p_most float8, p_lease_us bigint, p_since_us bigint, p_until_us bigint, p_as_of_us bigint, p_waits boolean)
RETURNS TABLE (ord bigint, allowed boolean, value float8, ts bigint, capacity float8, fence bigint, until_us bigint, last_us bigint,
    leases bigint[], now_us bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_all  integer := cardinality(p_keys);
    v_rows integer;
    v_now  bigint;
BEGIN
    IF p_waits THEN -- the clock is read behind the lock
        PERFORM FROM ratelimit.buckets AS b WHERE b.name = p_name AND b.key = p_keys[1] AND b.shard = 0 FOR NO KEY UPDATE;
        IF NOT FOUND THEN
            INSERT INTO ratelimit.buckets (name, key, shard, value, ts, capacity, leased)
            VALUES (p_name, p_keys[1], 0, p_most, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, p_most, '{0}') ON CONFLICT DO NOTHING;
            PERFORM FROM ratelimit.buckets AS b WHERE b.name = p_name AND b.key = p_keys[1] AND b.shard = 0 FOR NO KEY UPDATE;
        END IF;
    ELSE
        PERFORM set_config('lock_timeout', '1ms', true);
    END IF;
    v_now := coalesce(p_as_of_us, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    IF v_now NOT BETWEEN p_since_us AND p_until_us THEN
        RETURN;
    END IF;
    RETURN QUERY
    WITH given AS (
        UPDATE ratelimit.buckets AS b SET
            value = b.value - a.slots,
            ts = greatest(b.ts, v_now),
            leased = ARRAY[
                CASE WHEN v_now > b.leased[1] THEN v_now ELSE v_now + ((b.leased[1] - v_now) / 65536 + 1) * 65536 END + (a.leases - 1) * 65536,
                least(b.leased[2], v_now + p_lease_us),
                v_now + p_lease_us]
        FROM (
            SELECT p_name AS name, u.key, 0 AS shard, u.slots, u.leases, u.ord
            FROM unnest((SELECT p_keys), p_sums, p_counts) WITH ORDINALITY AS u (key, slots, leases, ord)
            LIMIT v_all) AS a
        WHERE b.name = ANY (ARRAY[a.name]) AND b.key = a.key AND b.shard = a.shard
            AND b.capacity = p_most AND b.value >= a.slots AND b.leased[1] IS NOT NULL
            AND (b.leased[2] <= v_now OR b.leased[3] > v_now + p_lease_us) IS NOT TRUE
            AND (p_since_us IS NULL OR b.ts BETWEEN p_since_us AND p_until_us) AND b.ts <= v_now + 60000000
        RETURNING a.ord, a.key, b.value, b.ts, b.capacity, b.leased[1] - (a.leases - 1) * 65536 AS fence, b.leased[3] AS last_us
    ), kept AS (
        INSERT INTO ratelimit.leases (name, key, fence, until_us, slots)
        SELECT p_name, g.key, g.fence + u.nth * 65536, v_now + p_lease_us, u.slots
        FROM given AS g JOIN unnest((SELECT p_places), p_slots, p_nths) AS u (place, slots, nth) ON u.place = g.ord
        ON CONFLICT (name, key, fence) DO UPDATE SET until_us = excluded.until_us, slots = excluded.slots
    )
    SELECT g.ord, true, g.value, g.ts, g.capacity, g.fence, v_now + p_lease_us, g.last_us, NULL::bigint[], v_now FROM given AS g;
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    IF v_rows = v_all THEN
        RETURN;
    END IF;

    -- Buckets without a row are full. The rows that have just been written are found, too; their first answer counts.
    RETURN QUERY
    WITH rest AS MATERIALIZED (
        SELECT a.ord, a.key, a.slots, a.leases, b.ts IS NULL AS missing, b.value, b.ts, b.capacity, b.fence
        FROM unnest((SELECT p_keys), p_sums, p_counts) WITH ORDINALITY AS a (key, slots, leases, ord)
        LEFT JOIN LATERAL (
            SELECT r.value, r.ts, r.capacity, r.leased[1] AS fence FROM ratelimit.buckets AS r
            WHERE r.name = p_name AND r.key = a.key AND r.shard = 0 LIMIT 1) AS b ON true
    ), made AS (
        INSERT INTO ratelimit.buckets (name, key, shard, value, ts, capacity, leased)
        SELECT p_name, r.key, 0, p_most - r.slots, v_now, p_most, ARRAY[v_now + (r.leases - 1) * 65536, v_now + p_lease_us, v_now + p_lease_us]
        FROM rest AS r WHERE r.missing
    ), kept AS (
        INSERT INTO ratelimit.leases (name, key, fence, until_us, slots)
        SELECT p_name, r.key, v_now + u.nth * 65536, v_now + p_lease_us, u.slots
        FROM rest AS r JOIN unnest((SELECT p_places), p_slots, p_nths) AS u (place, slots, nth) ON u.place = r.ord WHERE r.missing
        ON CONFLICT (name, key, fence) DO UPDATE SET until_us = excluded.until_us, slots = excluded.slots
    )
    SELECT r.ord, r.missing, coalesce(r.value, p_most - r.slots), coalesce(r.ts, v_now), coalesce(r.capacity, p_most),
        CASE WHEN r.missing THEN v_now ELSE r.fence END, v_now + p_lease_us, v_now + p_lease_us,
        CASE WHEN NOT r.missing THEN coalesce(r.fence, 0) || ARRAY(
            SELECT u.n FROM ratelimit.leases AS l, unnest(ARRAY[l.fence, l.until_us, l.slots]) WITH ORDINALITY AS u (n, place)
            WHERE l.name = p_name AND l.key = r.key AND l.slots > 0 ORDER BY l.fence, u.place) END,
        v_now
    FROM rest AS r;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.acquire_set_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.acquire_set_1;
