-- +goose Up
-- change_lease_1 extends the lease p_fence on a bucket, to end no earlier than p_lease_us from now, or gives it back, if p_lease_us is null. The
-- row of the bucket is locked and isn't changed.
--
-- slots is how many slots the lease has, and until_us its end; null: it isn't held.
--
-- Exact at every isolation level, and without SIREAD locks: a SERIALIZABLE transaction leaves a lease without slots, if it gives one back or if
-- there was none.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.change_lease_1(
    p_name text, p_key text, p_fence bigint, p_lease_us bigint, p_now_us bigint, OUT slots bigint, OUT until_us bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    IF current_setting('transaction_isolation') = 'serializable' THEN -- the until_us of a lease that is given back says how many slots it had
        INSERT INTO ratelimit.leases AS l (name, key, fence, until_us, slots) VALUES (p_name, p_key, p_fence, 0, 0)
        ON CONFLICT (name, key, fence) DO UPDATE SET
            until_us = CASE WHEN p_lease_us IS NULL THEN -l.slots ELSE greatest(l.until_us, p_now_us + p_lease_us) END,
            slots = CASE WHEN p_lease_us IS NULL THEN 0 ELSE l.slots END
        WHERE l.until_us > p_now_us AND l.slots > 0
        RETURNING nullif(CASE WHEN p_lease_us IS NULL THEN -l.until_us ELSE l.slots END, 0), l.until_us INTO slots, until_us;
    ELSIF p_lease_us IS NULL THEN
        DELETE FROM ratelimit.leases AS l
        WHERE l.name = p_name AND l.key = p_key AND l.fence = p_fence AND l.until_us > p_now_us AND l.slots > 0
        RETURNING l.slots, l.until_us INTO slots, until_us;
    ELSE
        UPDATE ratelimit.leases AS l SET until_us = greatest(l.until_us, p_now_us + p_lease_us)
        WHERE l.name = p_name AND l.key = p_key AND l.fence = p_fence AND l.until_us > p_now_us AND l.slots > 0
        RETURNING l.slots, l.until_us INTO slots, until_us;
    END IF;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.change_lease_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.change_lease_1;
