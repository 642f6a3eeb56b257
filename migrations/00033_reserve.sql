-- +goose Up
-- The functions for people that reserve tokens and hold slots (docs/sql.md), on one limit each.
CREATE TYPE ratelimit.reservation AS (id uuid, allowed boolean, ready_at timestamptz, remaining float8, retry_after float8, rule text, mode text);
COMMENT ON TYPE ratelimit.reservation IS 'id: for settle and cancel; null if nothing was reserved. ready_at: when the work may run. remaining: tokens left, never below 0. retry_after: seconds until the same call would be allowed; null if it was.';
CREATE TYPE ratelimit.lease AS (fence bigint, allowed boolean, ends_at timestamptz, free float8, retry_after float8, rule text, mode text);
COMMENT ON TYPE ratelimit.lease IS 'fence: the number of the lease, for renew_lease and release; null if it holds nothing. ends_at: when its slots are free by themselves. free: slots that are left. retry_after: seconds until slots are free at the latest; null if it was allowed.';

-- +goose StatementBegin
CREATE FUNCTION ratelimit.reserve(name text, key text, cost float8 DEFAULT 1, plan text DEFAULT NULL, id uuid DEFAULT gen_random_uuid()) RETURNS ratelimit.reservation
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    t ratelimit.terms := ratelimit.terms_of($1, ratelimit.checked_key($1, $2), $4, $3, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, NULL);
    d ratelimit.decision;
    r record;
    v_free boolean := t.mode = 'off'; -- whether nothing is taken
BEGIN
    IF $5 IS NULL THEN
        RAISE EXCEPTION 'ratelimit: the id of the reservation for % is NULL', quote_literal($1) USING ERRCODE = 'invalid_parameter_value', HINT = 'Leave it out for a new one.';
    ELSIF t.max_owed IS NULL THEN
        RAISE EXCEPTION 'ratelimit: no tokens of the limit % can be reserved', quote_literal($1) USING ERRCODE = 'feature_not_supported',
            HINT = CASE t.kind WHEN 'concurrency' THEN 'Call acquire, and release.' ELSE 'Call take, and again after retry_after.' END;
    ELSIF NOT t.capacity - t.cost >= -t.max_owed AND t.mode = 'on' THEN
        RAISE EXCEPTION 'ratelimit: the cost for % is %, and its capacity and max_reserved are % and %', quote_literal($1), t.cost, t.capacity, t.max_owed
            USING ERRCODE = 'numeric_value_out_of_range', HINT = 'Pass at most their sum.';
    END IF;
    t.lowest := -t.max_owed;
    BEGIN
        LOOP
            IF v_free THEN
                t.cost := 0; t.lowest := -1.7e308;
            END IF;
            r := ratelimit.reserve_1($5, t.name, t.key, 0, t.cost, t.capacity, t.rate, t.steps, t.step_us, t.phase_us, t.lowest, t.since_us, t.last_us, NULL, false,
                nullif(t.plan, ''), t.calendar, CASE WHEN t.paused_us > t.now_us THEN t.paused_us ELSE 0 END, NULL, 86400000000, false, t.mode = 'on');
            t.allowed := r.allowed; t.value := r.value; t.ts := r.ts; t.held := r.capacity; t.now_us := r.now_us; t.ready_us := r.ready_us;
            IF t.allowed IS NULL THEN
                t := (ratelimit.decide(ARRAY[t], 'reserve', $5))[1];
            END IF;
            EXIT WHEN t.allowed OR t.mode <> 'shadow' OR v_free;
            d := ratelimit.decision_of(ratelimit.told(t)); -- of the refusal that is only noted
            v_free := true;
        END LOOP;
        IF NOT t.allowed THEN
            RAISE SQLSTATE 'RL001';
        END IF;
    EXCEPTION WHEN SQLSTATE 'RL001' THEN -- the row is as before
        NULL;
    END;
    d := coalesce(d, ratelimit.decision_of(ratelimit.told(t)));
    RETURN (CASE WHEN t.allowed THEN $5 END, t.allowed, CASE WHEN t.allowed THEN timestamptz 'epoch' + t.ready_us * interval '1 microsecond' END,
        d.remaining, d.retry_after, t.rule, t.mode)::ratelimit.reservation;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.reserve FROM PUBLIC;
COMMENT ON FUNCTION ratelimit.reserve IS 'Takes tokens also before they are there: SELECT * FROM ratelimit.reserve(''messages'', user_id::text, 5). Run the work at ready_at, then call settle with what it used, or cancel. The same id twice is an error. An open reservation ends a day after ready_at, and keeps what it took.';

-- end_reservation ends a reservation under the policy that its limit has now, or under its own if the limit has no rule any more.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.end_reservation(p_id uuid, p_final text, p_used float8) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    v      ratelimit.reservations;
    t      ratelimit.terms;
    o      ratelimit.compiled_rules; -- its own
    r      record;
    v_ends boolean; -- whether the policy is in effect for a time
    v_left float8;
BEGIN
    IF (p_used >= 0 AND p_used <= 1e12) IS NOT TRUE THEN
        RAISE EXCEPTION 'ratelimit: the reservation used %', coalesce(p_used::text, 'NULL') USING ERRCODE = 'numeric_value_out_of_range', HINT = 'Pass a number of tokens from 0 to 1e12.';
    ELSIF current_setting('transaction_isolation') = 'serializable' AND p_id IS NOT NULL THEN -- a SELECT would take SIREAD locks
        r := ratelimit.settle_1(p_id, p_final, NULL, NULL, 0, true, false, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, false, NULL, NULL);
        v.name := r.name; v.key := r.key; v.plan := r.plan; v.state := r.state;
    ELSE
        SELECT s.* INTO v FROM ratelimit.reservations AS s WHERE s.id = p_id;
    END IF;
    IF v.state IS NULL THEN
        RAISE EXCEPTION 'ratelimit: there is no reservation %', coalesce(p_id::text, 'NULL') USING ERRCODE = 'undefined_object', HINT = 'Its transaction was rolled back, or it ended long ago.';
    ELSIF v.state <> 'open' THEN
        RETURN false;
    END IF;
    BEGIN
        t := ratelimit.terms_of(v.name, v.key, v.plan, 0, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, NULL);
    EXCEPTION WHEN undefined_object OR feature_not_supported THEN
        o.name := v.name;
    END;
    v_ends := t.since_us > -9223372036854775808 OR t.last_us < 9223372036854775806;
    r := ratelimit.settle_1(p_id, p_final, NULL, NULL, p_used, t.mode IS DISTINCT FROM 'off', o.name IS NOT NULL, t.capacity, t.rate, t.steps, t.step_us, t.phase_us,
        CASE WHEN v_ends THEN t.since_us END, CASE WHEN v_ends THEN t.last_us END, nullif(t.reset_us, -9223372036854775808), t.calendar IS NOT NULL, NULL, NULL);
    IF r.done THEN
        RETURN r.state = 'open';
    END IF;

    -- There are several buckets, or this one was used under another policy since, or in another window.
    UPDATE ratelimit.reservations AS s SET state = p_final, settled = CASE p_final WHEN 'settled' THEN CASE t.mode WHEN 'off' THEN least(p_used, s.cost) ELSE p_used END END,
        expires_us = greatest(s.expires_us, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) WHERE s.id = p_id AND s.state = 'open' RETURNING s.* INTO v;
    IF NOT FOUND THEN
        RETURN false;
    ELSIF v.others IS NOT NULL THEN
        RAISE EXCEPTION 'ratelimit: the reservation % is of several limits', p_id USING ERRCODE = 'feature_not_supported', HINT = 'A program in Go has made it: end it there.';
    ELSIF o.name IS NOT NULL THEN
        o.since_us := -9223372036854775808; o.last_us := 9223372036854775806; o.mode := 'on'; o.rule := v.name; o.shards := 1; o.keyed := false;
        o.kind := CASE WHEN v.calendar IS NOT NULL THEN 'calendar window' WHEN v.step_us = 1 THEN 'token bucket' ELSE 'fixed window' END;
        o.capacity := v.capacity; o.rate := v.rate; o.steps := v.steps; o.step_us := v.step_us; o.phase_us := v.phase_us; o.calendar := v.calendar;
        t := ratelimit.terms_of(v.name, v.key, v.plan, 0, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, NULL, o);
    END IF;
    t.shard := v.shard; t.cost := abs(p_used - v.cost); t.paid_us := v.paid_us; t.most := v.capacity;
    v_left := ceil((v.paid_us - t.now_us)::float8 / v.step_us::float8);
    IF p_used < v.cost AND v.owed <> 0 AND v.step_us > 1 AND t.step_us > 1 AND v_left < ceil(v.owed / (v.rate / v.steps)) THEN -- as in settle_1
        t.cost := least(t.cost, greatest(0, least(v.cost, v.capacity + v.owed - (ceil(v.owed / (v.rate / v.steps)) - greatest(v_left, 0)) * (v.rate / v.steps))));
    END IF;
    IF t.cost > 0 AND (p_used < v.cost OR t.mode <> 'off') THEN
        PERFORM ratelimit.decide(ARRAY[t], CASE WHEN p_used < v.cost THEN 'credit' ELSE 'charge' END, NULL, o);
    END IF;
    RETURN true;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.end_reservation FROM PUBLIC;

-- +goose StatementBegin
CREATE FUNCTION ratelimit.settle(id uuid, used float8) RETURNS boolean
LANGUAGE plpgsql AS $$ BEGIN RETURN ratelimit.end_reservation($1, 'settled', $2); END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.settle FROM PUBLIC;
COMMENT ON FUNCTION ratelimit.settle IS 'Ends a reservation with what its work used: a surplus goes back, and what is missing is taken. False if it has ended before; then nothing changes.';

-- +goose StatementBegin
CREATE FUNCTION ratelimit.cancel(id uuid) RETURNS boolean
LANGUAGE plpgsql AS $$ BEGIN RETURN ratelimit.end_reservation($1, 'cancelled', 0); END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.cancel FROM PUBLIC;
COMMENT ON FUNCTION ratelimit.cancel IS 'Ends a reservation whose work will not run, and gives back what it took. False if it has ended before; then nothing changes.';

-- slots_of returns the policy of a limit on concurrency.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.slots_of(p_name text, p_key text, p_slots integer, p_plan text) RETURNS ratelimit.terms
LANGUAGE plpgsql AS $$
DECLARE
    t ratelimit.terms := ratelimit.terms_of(p_name, ratelimit.checked_key(p_name, p_key), p_plan, p_slots, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, NULL);
BEGIN
    IF t.kind <> 'concurrency' THEN
        RAISE EXCEPTION 'ratelimit: the limit % gives tokens, not slots', quote_literal(p_name) USING ERRCODE = 'feature_not_supported', HINT = 'Call take.';
    ELSIF p_slots < 1 OR p_slots > t.capacity AND t.mode = 'on' AND (t.paused_us > t.now_us) IS NOT TRUE THEN
        RAISE EXCEPTION 'ratelimit: the slots for % are %, and it has %', quote_literal(p_name), p_slots, t.capacity USING ERRCODE = 'numeric_value_out_of_range', HINT = 'Pass 1 or more, up to that.';
    END IF;
    RETURN t;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.slots_of FROM PUBLIC;

-- +goose StatementBegin
CREATE FUNCTION ratelimit.acquire(name text, key text, slots integer DEFAULT 1, plan text DEFAULT NULL) RETURNS ratelimit.lease
LANGUAGE plpgsql AS $$
DECLARE
    t ratelimit.terms := ratelimit.slots_of($1, $2, $3, $4);
    r record;
    v_ends bigint; -- when enough leases have ended
BEGIN
    IF t.paused_us > t.now_us THEN
        RETURN (NULL, false, NULL, 0, least(t.paused_us - t.now_us, 7884000000000000) / 1e6::float8, t.rule, 'paused')::ratelimit.lease;
    ELSIF t.mode = 'off' THEN
        RETURN (NULL, true, NULL, t.capacity, NULL, t.rule, t.mode)::ratelimit.lease;
    ELSIF t.cost > t.capacity THEN
        RETURN (NULL, true, NULL, 0, 7884000000, t.rule, t.mode)::ratelimit.lease;
    END IF;
    r := ratelimit.acquire_1(t.name, t.key, $3, t.capacity, t.lease_us, 0, t.since_us, t.last_us, NULL, false);
    t.allowed := r.allowed; t.value := r.value; t.ts := r.ts; t.now_us := r.now_us;
    t.leases := CASE WHEN r.allowed THEN ARRAY[r.fence, 0, 0, 0, r.fence, r.until_us, $3] ELSE r.leases END;
    IF t.allowed IS NULL THEN -- a row of an earlier policy
        t := (ratelimit.decide(ARRAY[t], 'take'))[1];
    END IF;
    IF t.allowed THEN
        RETURN (t.leases[1], true, timestamptz 'epoch' + t.leases[6] * interval '1 microsecond', t.value, NULL, t.rule, t.mode)::ratelimit.lease;
    END IF;
    SELECT min(l.until_us) INTO v_ends FROM (
        SELECT t.leases[3 * n] AS until_us, t.value + sum(t.leases[3 * n + 1]) OVER (ORDER BY t.leases[3 * n], n) AS free FROM generate_series(1, cardinality(t.leases) / 3) AS n) AS l
    WHERE l.free >= t.cost;
    RETURN (NULL, t.mode = 'shadow', NULL, greatest(t.value, 0), coalesce((v_ends - t.now_us) / 1e6::float8, 7884000000), t.rule, t.mode)::ratelimit.lease;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.acquire FROM PUBLIC;
COMMENT ON FUNCTION ratelimit.acquire IS 'Takes a lease on slots of a limit on concurrency: SELECT * FROM ratelimit.acquire(''jobs'', ''tenant-7''). Commit before the work, call renew_lease before ends_at while it runs, and release when it is done.';

-- +goose StatementBegin
CREATE FUNCTION ratelimit.renew_lease(name text, key text, fence bigint, plan text DEFAULT NULL) RETURNS timestamptz
LANGUAGE plpgsql AS $$
DECLARE
    t ratelimit.terms := ratelimit.slots_of($1, $2, 1, $4);
    r record;
BEGIN
    IF $3 IS NULL THEN
        RETURN NULL;
    END IF;
    r := ratelimit.renew_lease_1(t.name, t.key, $3, t.lease_us, t.capacity, t.reset_us, NULL, NULL);
    IF r.held IS NULL THEN -- a wrong clock has written the row
        t.fence := $3;
        t := (ratelimit.decide(ARRAY[t], 'renew'))[1];
        RETURN timestamptz 'epoch' + CASE WHEN t.allowed THEN t.leases[3] END * interval '1 microsecond';
    END IF;
    RETURN timestamptz 'epoch' + CASE WHEN r.held THEN r.until_us END * interval '1 microsecond';
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.renew_lease FROM PUBLIC;
COMMENT ON FUNCTION ratelimit.renew_lease IS 'Extends a lease, and returns its new end. Null: it has ended, so stop the work.';

-- +goose StatementBegin
CREATE FUNCTION ratelimit.release(name text, key text, fence bigint, plan text DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    t ratelimit.terms;
    v_held boolean := false;
BEGIN
    BEGIN
        t := ratelimit.slots_of($1, $2, 1, $4);
    EXCEPTION WHEN undefined_object THEN -- the rule was deleted, and leases are held
        SELECT b.name, b.key, b.capacity INTO t.name, t.key, t.capacity
        FROM ratelimit.buckets AS b WHERE b.name = $1 AND b.key = $2 AND b.shard = 0 AND b.leased IS NOT NULL;
        IF NOT FOUND THEN
            RAISE;
        END IF;
    END;
    IF $3 IS NOT NULL THEN
        v_held := (ratelimit.release_1(t.name, t.key, $3, t.capacity, t.reset_us, NULL, NULL)).held;
    END IF;
    IF v_held IS NULL THEN -- a wrong clock has written the row
        t.fence := $3;
        v_held := ((ratelimit.decide(ARRAY[t], 'release'))[1]).allowed;
    END IF;
    RETURN v_held;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.release FROM PUBLIC;
COMMENT ON FUNCTION ratelimit.release IS 'Gives back the slots of a lease. False: it was held no more, so the work may have run beside other holders.';

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.release, ratelimit.renew_lease, ratelimit.acquire, ratelimit.slots_of, ratelimit.cancel, ratelimit.settle,
    ratelimit.end_reservation, ratelimit.reserve;
DROP TYPE ratelimit.lease;
DROP TYPE ratelimit.reservation;
