-- +goose Up
-- renew_lease_1 extends the lease p_fence on one bucket of a limit on concurrency, to end no earlier than p_lease_us from now.
--
-- The other parameters, held and now_us are those of release_1. until_us is the end of the lease, if it is held.
--
-- Exact at every isolation level, and without SIREAD locks. A SERIALIZABLE transaction leaves a lease without slots if there was none.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.renew_lease_1(
    p_name text, p_key text, p_fence bigint, p_lease_us bigint, p_most float8, p_since_us bigint, p_until_us bigint, p_as_of_us bigint,
    OUT held boolean, OUT until_us bigint, OUT now_us bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_ts bigint;
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
        SELECT c.until_us INTO until_us FROM ratelimit.change_lease_1(p_name, p_key, p_fence, p_lease_us, now_us) AS c WHERE c.slots > 0;
    END IF;
    held := until_us IS NOT NULL;
    IF held THEN
        INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity) VALUES (p_name, p_key, 0, p_most, now_us, p_most)
        ON CONFLICT (name, key, shard) DO UPDATE SET ts = greatest(b.ts, now_us), leased[3] = greatest(b.leased[3], renew_lease_1.until_us);
    END IF;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.renew_lease_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.renew_lease_1;
