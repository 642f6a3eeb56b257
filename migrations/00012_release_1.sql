-- +goose Up
-- release_1 gives back the slots of the lease p_fence on one bucket of a limit on concurrency.
--
-- p_most                        the slots of the limit
-- p_since_us .. p_as_of_us      as in take_1
--
-- held is whether the lease was held until now. If not, nothing changes. held is null, and nothing changes, where acquire_1 leaves allowed
-- null. now_us is the instant of the decision.
--
-- Exact at every isolation level, and without SIREAD locks: a SERIALIZABLE transaction leaves a lease without slots. The bucket is locked first,
-- as acquire_1 does.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.release_1(
    p_name text, p_key text, p_fence bigint, p_most float8, p_since_us bigint, p_until_us bigint, p_as_of_us bigint,
    OUT held boolean, OUT now_us bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_serializable boolean := current_setting('transaction_isolation') = 'serializable';
    v_ts           bigint;
    v_slots        bigint;
BEGIN
    IF v_serializable THEN
        INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity)
        VALUES (p_name, p_key, 0, p_most, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, p_most)
        ON CONFLICT (name, key, shard) DO UPDATE SET value = b.value
        RETURNING b.ts INTO v_ts;
    ELSE
        SELECT b.ts INTO v_ts FROM ratelimit.buckets AS b WHERE b.name = p_name AND b.key = p_key AND b.shard = 0 FOR NO KEY UPDATE;
    END IF;
    now_us := coalesce(p_as_of_us, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    IF (now_us NOT BETWEEN p_since_us AND p_until_us OR v_ts NOT BETWEEN p_since_us AND p_until_us OR v_ts > now_us + 60000000) IS TRUE THEN
        RETURN;
    END IF;
    IF v_serializable THEN -- until_us says how many they were
        INSERT INTO ratelimit.leases AS l (name, key, fence, until_us, slots) VALUES (p_name, p_key, p_fence, 0, 0)
        ON CONFLICT (name, key, fence) DO UPDATE SET until_us = -l.slots, slots = 0 WHERE l.until_us > now_us AND l.slots > 0
        RETURNING -l.until_us INTO v_slots;
    ELSE
        DELETE FROM ratelimit.leases AS l
        WHERE l.name = p_name AND l.key = p_key AND l.fence = p_fence AND l.until_us > now_us AND l.slots > 0 AND v_ts IS NOT NULL
        RETURNING l.slots INTO v_slots;
    END IF;
    held := coalesce(v_slots, 0) > 0;
    IF held THEN
        INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity) VALUES (p_name, p_key, 0, p_most, now_us, p_most)
        ON CONFLICT (name, key, shard) DO UPDATE SET
            value = b.value + v_slots,
            ts = greatest(b.ts, now_us),
            first_us = CASE WHEN b.value + v_slots < b.capacity THEN b.first_us END,
            last_us = CASE WHEN b.value + v_slots < b.capacity THEN b.last_us END;
    END IF;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.release_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.release_1;
