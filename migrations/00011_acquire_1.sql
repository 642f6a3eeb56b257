-- +goose Up
-- acquire_1 takes a lease on p_slots slots of one bucket of a limit on concurrency, or refuses.
--
-- p_most, p_lowest              slots: how many the limit has, and the least that may stay free: 0
-- p_lease_us                    how long the lease is
-- p_since_us .. p_alone         as in take_1
--
-- allowed is null, and nothing was taken, where take_1 leaves it null, and if a wrong clock has written ts. Otherwise value, ts and capacity
-- are those of the row after the decision. If allowed, fence is the number of the lease, until_us its end, and last_us the last end of all
-- leases. If refused, leases has the last fencing number, and then number, end and slots of each lease that is held. now_us is the instant of
-- the decision.
--
-- Mostly no lease has ended and a slot is free, so the leases aren't read, however many there are. The fencing number of a lease is the
-- instant at which it was taken, or, if that isn't above the last one, higher by whole 65,536 us. So the number of a lease that was rolled
-- back isn't given again.
--
-- Exact at every isolation level. A call that is alone and refuses locks and writes nothing. Another one keeps the row locked to the end
-- of the transaction. In a SERIALIZABLE transaction it takes SIREAD locks only to find leases that have ended, and a refusal otherwise returns
-- the held slots as one lease with the number 0, which ends with the last.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.acquire_1(
    p_name text, p_key text, p_slots bigint, p_most float8, p_lease_us bigint, p_lowest float8,
    p_since_us bigint, p_until_us bigint, p_as_of_us bigint, p_alone boolean,
    OUT allowed boolean, OUT value float8, OUT ts bigint, OUT capacity float8, OUT fence bigint, OUT until_us bigint, OUT last_us bigint,
    OUT leases bigint[], OUT now_us bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_row   record;
    v_held  float8;
    v_first bigint;
BEGIN
    now_us := coalesce(p_as_of_us, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    IF now_us NOT BETWEEN p_since_us AND p_until_us THEN
        RETURN;
    END IF;
    until_us := now_us + p_lease_us;
    IF p_alone THEN
        UPDATE ratelimit.buckets AS b SET
            value = b.value - p_slots,
            ts = greatest(b.ts, now_us),
            leased = ARRAY[
                CASE WHEN now_us > b.leased[1] THEN now_us ELSE now_us + ((b.leased[1] - now_us) / 65536 + 1) * 65536 END,
                least(b.leased[2], now_us + p_lease_us),
                now_us + p_lease_us]
        WHERE b.name = p_name AND b.key = p_key AND b.shard = 0
            AND b.capacity = p_most AND b.value - p_slots >= p_lowest AND b.leased[1] IS NOT NULL
            AND (b.leased[2] <= now_us OR b.leased[3] > now_us + p_lease_us) IS NOT TRUE
            AND (p_since_us IS NULL OR b.ts BETWEEN p_since_us AND p_until_us) AND b.ts <= now_us + 60000000
        RETURNING b.value, b.ts, b.capacity, b.leased[1], b.leased[3] INTO value, ts, capacity, fence, last_us;
    ELSIF p_most - p_slots >= p_lowest THEN -- the same, by a write that reads through no snapshot
        INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity, leased)
        VALUES (p_name, p_key, 0, p_most - p_slots, now_us, p_most, ARRAY[now_us, now_us + p_lease_us, now_us + p_lease_us])
        ON CONFLICT (name, key, shard) DO UPDATE SET
            value = b.value - p_slots,
            ts = greatest(b.ts, now_us),
            leased = ARRAY[
                CASE WHEN now_us > b.leased[1] THEN now_us ELSE now_us + ((b.leased[1] - now_us) / 65536 + 1) * 65536 END,
                least(b.leased[2], now_us + p_lease_us),
                now_us + p_lease_us]
        WHERE b.capacity = p_most AND b.value - p_slots >= p_lowest AND b.leased[1] IS NOT NULL
            AND (b.leased[2] <= now_us OR b.leased[3] > now_us + p_lease_us) IS NOT TRUE
            AND (p_since_us IS NULL OR b.ts BETWEEN p_since_us AND p_until_us) AND b.ts <= now_us + 60000000
        RETURNING b.value, b.ts, b.capacity, b.leased[1], b.leased[3] INTO value, ts, capacity, fence, last_us;
    ELSE
        PERFORM 1 WHERE false;
    END IF;
    IF FOUND AND p_as_of_us IS NULL AND (extract(epoch FROM clock_timestamp()) * 1000000)::bigint - now_us > p_lease_us / 64 THEN
        -- It has waited for the row. The lease is as long as others.
        now_us := (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;
        ts := greatest(ts, now_us); until_us := now_us + p_lease_us; last_us := until_us;
        INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity) VALUES (p_name, p_key, 0, p_most, now_us, p_most)
        ON CONFLICT (name, key, shard) DO UPDATE SET ts = acquire_1.ts, leased[3] = acquire_1.last_us;
    END IF;

    IF NOT FOUND THEN
        IF p_alone THEN
            SELECT b.value, b.ts, b.capacity, b.leased,
                ARRAY(SELECT u.n FROM ratelimit.leases AS l, unnest(ARRAY[l.fence, l.until_us, l.slots]) WITH ORDINALITY AS u (n, place)
                    WHERE l.name = p_name AND l.key = p_key AND l.until_us > now_us AND l.slots > 0 ORDER BY l.fence, u.place) AS leases,
                (SELECT sum(l.slots) FROM ratelimit.leases AS l WHERE l.name = p_name AND l.key = p_key AND l.until_us > now_us) AS held
            INTO v_row
            FROM ratelimit.buckets AS b WHERE b.name = p_name AND b.key = p_key AND b.shard = 0;
            IF FOUND AND (v_row.ts NOT BETWEEN p_since_us AND p_until_us OR v_row.ts > now_us + 60000000) THEN
                RETURN;
            END IF;
            v_held := coalesce(v_row.held, 0);
            IF NOT p_most - v_held - p_slots >= p_lowest THEN
                allowed := false; value := p_most - v_held; ts := coalesce(v_row.ts, now_us); capacity := p_most;
                leases := coalesce(v_row.leased[1], 0) || v_row.leases;
                RETURN;
            END IF;
        END IF;

        -- A row that is made has the last number 0. If there are leases nevertheless, the row was deleted by hand, and they are lost with it.
        IF current_setting('transaction_isolation') <> 'serializable' THEN
            SELECT b.* INTO v_row FROM ratelimit.buckets AS b WHERE b.name = p_name AND b.key = p_key AND b.shard = 0 FOR NO KEY UPDATE;
        END IF;
        IF NOT FOUND THEN
            INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity, leased) VALUES (p_name, p_key, 0, p_most, now_us, p_most, '{0}')
            ON CONFLICT (name, key, shard) DO UPDATE SET value = b.value
            RETURNING b.* INTO v_row;
        END IF;
        now_us := coalesce(p_as_of_us, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint); -- behind the lock
        IF (now_us NOT BETWEEN p_since_us AND p_until_us OR v_row.ts NOT BETWEEN p_since_us AND p_until_us) IS TRUE OR v_row.ts > now_us + 60000000 THEN
            RETURN;
        END IF;
        until_us := now_us + p_lease_us;
        ts := v_row.ts; capacity := p_most;
        IF v_row.capacity = p_most AND v_row.leased[1] IS NOT NULL AND NOT v_row.value - p_slots >= p_lowest AND (v_row.leased[2] <= now_us) IS NOT TRUE
            AND current_setting('transaction_isolation') = 'serializable' THEN
            allowed := false; value := v_row.value;
            leases := ARRAY[v_row.leased[1], 0, v_row.leased[3], p_most - value];
            RETURN;
        END IF;
        SELECT coalesce(sum(l.slots), 0), min(l.until_us), max(l.until_us) INTO v_held, v_first, last_us
        FROM ratelimit.leases AS l WHERE l.name = p_name AND l.key = p_key AND l.until_us > now_us AND l.slots > 0 AND v_row.leased[1] IS DISTINCT FROM 0;
        allowed := p_most - v_held - p_slots >= p_lowest;
        IF NOT allowed THEN
            value := p_most - v_held;
            leases := coalesce(v_row.leased[1], 0) || ARRAY(
                SELECT u.n FROM ratelimit.leases AS l, unnest(ARRAY[l.fence, l.until_us, l.slots]) WITH ORDINALITY AS u (n, place)
                WHERE l.name = p_name AND l.key = p_key AND l.until_us > now_us AND l.slots > 0 ORDER BY l.fence, u.place);
            RETURN;
        END IF;
        DELETE FROM ratelimit.leases AS l WHERE l.name = p_name AND l.key = p_key AND (l.until_us <= now_us OR v_row.leased[1] = 0);
        value := p_most - v_held - p_slots;
        ts := greatest(ts, now_us);
        fence := CASE WHEN now_us > coalesce(v_row.leased[1], 0) THEN now_us ELSE now_us + ((v_row.leased[1] - now_us) / 65536 + 1) * 65536 END;
        last_us := greatest(last_us, until_us);
        INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity) VALUES (p_name, p_key, 0, p_most, now_us, p_most)
        ON CONFLICT (name, key, shard) DO UPDATE SET value = acquire_1.value, ts = acquire_1.ts, capacity = p_most,
            leased = ARRAY[acquire_1.fence, least(v_first, acquire_1.until_us), acquire_1.last_us];
    END IF;
    allowed := true;
    INSERT INTO ratelimit.leases AS l (name, key, fence, until_us, slots) VALUES (p_name, p_key, fence, until_us, p_slots)
    ON CONFLICT (name, key, fence) DO UPDATE SET until_us = excluded.until_us, slots = excluded.slots; -- of a row that was deleted by hand
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.acquire_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.acquire_1;
