-- +goose Up
-- slots_1 is the part of decide_rows_1 that is about a bucket of a limit on concurrency: it decides on the bucket, and changes its leases. It
-- doesn't change the row of the bucket, and makes no lease.
--
-- p_name .. p_leased            the row under the policy of now
-- p_verb, p_amount, p_lowest    as in decide_rows_1; mend: to put right only what a wrong clock has written; the other verbs change nothing
-- p_most, p_lease_us, p_fence   the slots of the limit, the length of a lease, and the lease that is renewed or released
-- p_ahead_us                    by how much the clock was wrong that wrote the row; null: it wasn't
-- p_new                         whether there was no row, or it was reset, so that leases on it are lost
-- p_locked                      whether the row is locked; otherwise the call only looks
--
-- enough is whether the verb is allowed, writes whether the row is to be written, and value to leased are its columns then. free is how many
-- slots are free before. until_us is the end of a lease that is taken, and slots how many it has. leases is the literal of what acquire_1 says.
--
-- It may have changed leases if it isn't allowed: then its caller undoes that. In a SERIALIZABLE transaction it takes SIREAD locks only to find
-- leases that have ended, and a refusal otherwise has the held slots as one lease with the number 0, which ends with the last.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.slots_1(
    p_name text, p_key text, p_value float8, p_ts bigint, p_capacity float8, p_leased bigint[],
    p_verb text, p_amount float8, p_lowest float8, p_most float8, p_lease_us bigint, p_fence bigint,
    p_now_us bigint, p_ahead_us bigint, p_new boolean, p_locked boolean,
    OUT enough boolean, OUT writes boolean, OUT free float8, OUT value float8, OUT ts bigint, OUT capacity float8, OUT leased bigint[],
    OUT until_us bigint, OUT slots bigint, OUT leases text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_serializable boolean := current_setting('transaction_isolation') = 'serializable';
    v_lease        record;
    v_held         float8 := 0;
    v_fence        bigint := coalesce(p_leased[1], 0);
    v_first        bigint;
    v_last         bigint;
    v_known        boolean; -- whether the row says enough about its leases
BEGIN
    enough := true; writes := true; value := p_value; ts := p_ts; capacity := p_capacity; leased := p_leased;
    IF p_locked AND p_ahead_us IS NOT NULL THEN -- a lease is as long as others from now on
        UPDATE ratelimit.leases AS l SET until_us = least(greatest(l.until_us - p_ahead_us, p_now_us + p_lease_us), p_now_us + 86400000000)
        WHERE l.name = p_name AND l.key = p_key AND l.until_us > p_now_us + p_lease_us + 60000000;
        leased[2] := p_now_us; -- is counted anew
    END IF;

    IF p_verb IN ('renew', 'release') THEN
        v_lease := ratelimit.change_lease_1(p_name, p_key, p_fence, CASE WHEN p_verb = 'renew' THEN p_lease_us END, p_now_us);
        enough := v_lease.slots IS NOT NULL AND NOT p_new;
        writes := enough OR p_ahead_us IS NOT NULL;
        IF enough AND p_verb = 'renew' THEN
            leased[3] := greatest(leased[3], v_lease.until_us);
            leases := format('{%s,%s,%s,%s}', v_fence, p_fence, v_lease.until_us, v_lease.slots);
        ELSIF enough THEN
            value := value + v_lease.slots;
            IF value >= capacity THEN
                leased := leased[: 1];
            END IF;
        END IF;
        IF enough THEN
            ts := greatest(ts, p_now_us);
        END IF;
        RETURN;
    ELSIF p_verb NOT IN ('take', 'mend', 'fill') THEN
        writes := false;
        RETURN;
    END IF;

    capacity := p_most;
    v_known := v_serializable AND p_ahead_us IS NULL AND p_capacity = p_most AND p_leased[2] > p_now_us
        AND (p_leased[3] <= p_now_us + p_lease_us OR NOT p_value - p_amount >= p_lowest);
    IF p_new OR p_verb = 'fill' THEN -- there are none
    ELSIF v_known THEN
        v_held := p_most - p_value; v_first := p_leased[2]; v_last := p_leased[3];
        leases := format('{%s,0,%s,%s}', v_fence, v_last, v_held);
    ELSE
        SELECT coalesce(sum(l.slots), 0), min(l.until_us), max(l.until_us), string_agg(format(',%s,%s,%s', l.fence, l.until_us, l.slots), '' ORDER BY l.fence)
        INTO v_held, v_first, v_last, leases
        FROM (
            SELECT r.fence, r.slots, CASE WHEN p_ahead_us IS NOT NULL AND NOT p_locked AND r.until_us > p_now_us + p_lease_us + 60000000
                THEN least(greatest(r.until_us - p_ahead_us, p_now_us + p_lease_us), p_now_us + 86400000000) ELSE r.until_us END AS until_us
            FROM ratelimit.leases AS r
            WHERE r.name = p_name AND r.key = p_key AND r.until_us > p_now_us AND r.slots > 0) AS l;
        leases := format('{%s%s}', v_fence, leases);
    END IF;
    value := p_most - v_held;
    free := value;
    enough := value - p_amount >= p_lowest OR p_verb <> 'take';
    IF NOT enough THEN
        writes := p_ahead_us IS NOT NULL;
        RETURN;
    END IF;
    ts := greatest(ts, p_now_us);
    IF p_verb = 'fill' THEN
        ts := p_now_us;
    ELSIF p_amount > 0 THEN
        until_us := p_now_us + p_lease_us;
        slots := ceil(p_amount);
        value := value - slots;
        v_first := least(v_first, until_us); v_last := greatest(v_last, until_us);
        v_fence := CASE WHEN p_now_us > v_fence THEN p_now_us ELSE p_now_us + ((v_fence - p_now_us) / 65536 + 1) * 65536 END;
    END IF;
    leased := CASE WHEN v_first IS NULL THEN ARRAY[v_fence] ELSE ARRAY[v_fence, v_first, v_last] END;
    IF p_locked AND (p_verb = 'fill' OR p_new AND NOT v_serializable) THEN
        DELETE FROM ratelimit.leases AS l WHERE l.name = p_name AND l.key = p_key;
    ELSIF p_locked AND NOT v_known AND NOT p_new AND (p_leased[2] > p_now_us) IS NOT TRUE THEN
        DELETE FROM ratelimit.leases AS l WHERE l.name = p_name AND l.key = p_key AND l.until_us <= p_now_us;
    END IF;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.slots_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.slots_1;
