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
    v_ts    bigint;
    v_slots bigint;
BEGIN
    IF current_setting('transaction_isolation') = 'serializable' THEN
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
    IF v_ts IS NOT NULL THEN
        SELECT c.slots INTO v_slots FROM ratelimit.change_lease_1(p_name, p_key, p_fence, NULL, now_us) AS c;
    END IF;
    held := v_slots IS NOT NULL;
    IF held THEN
        INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity) VALUES (p_name, p_key, 0, p_most, now_us, p_most)
        ON CONFLICT (name, key, shard) DO UPDATE SET
            value = b.value + v_slots,
            ts = greatest(b.ts, now_us),
            leased = CASE WHEN b.value + v_slots < b.capacity THEN b.leased ELSE b.leased[: 1] END;
    END IF;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.release_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.release_1;
