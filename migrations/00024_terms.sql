-- +goose Up
-- What the functions for people have in common (docs/sql.md). Each of them finds the policy of a key in the compiled rules, has a
-- versioned function decide, and puts its answer into words. None of them reads the table of rules.

-- A request, the policy that is in effect for it, and then the answer.
CREATE TYPE ratelimit.terms AS (
    name text, key text, shard integer, plan text, cost float8, lowest float8, fence bigint, -- lowest: what may remain; fence: of a lease
    most float8, paid_us bigint, ready_us bigint, -- of a reservation: the capacity then, when it was paid, and when its work may run
    rule text, mode text, kind text, capacity float8, rate float8, steps float8, step_us bigint, phase_us bigint, slices integer, max_owed float8, lease_us bigint, calendar text,
    from_us bigint, since_us bigint, last_us bigint, reset_us bigint, paused_us bigint, -- since when the policy and its numbers are in effect, and until when
    past jsonb, -- the columns of decide_rows_1 about a row of an earlier policy
    allowed boolean, value float8, ts bigint, held float8, taken float8[], leases bigint[], now_us bigint, remaining float8, retry_us bigint -- held: the capacity in the row
);

-- seeded_phase returns the phase of windows without a start, from FNV-1a of the name, NUL and the key.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.seeded_phase(p_name text, p_key text, p_step_us bigint) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_high  bigint := 3421674724;
    v_low   bigint := 2216829733;
    v_bytes bytea := convert_to(p_name, 'UTF8') || '\x00'::bytea || convert_to(p_key, 'UTF8');
BEGIN
    FOR i IN 0 .. length(v_bytes) - 1 LOOP
        v_low := v_low # get_byte(v_bytes, i);
        v_high := (v_high * 435 + ((v_low * 435) >> 32) + ((v_low & 16777215) << 8)) & 4294967295;
        v_low := (v_low * 435) & 4294967295;
    END LOOP;
    RETURN ratelimit.phase_from(((((v_high % p_step_us)::numeric * 4294967296) + v_low) % p_step_us)::bigint, p_step_us);
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.seeded_phase FROM PUBLIC;

-- calendar_begin returns when a window begins: the p_nth of a calendar (its days, months, month, first day and zone), counted from 1970 on. If
-- midnight occurs twice, it's the first one. Postgres means the second.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.calendar_begin(p_calendar text, p_nth bigint) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT (extract(epoch FROM CASE WHEN (m.at - interval '1 hour') AT TIME ZONE m.zone = m.day::timestamp THEN m.at - interval '1 hour' ELSE m.at END) * 1000000)::bigint
    FROM (SELECT d.zone, d.day, d.day::timestamp AT TIME ZONE d.zone AS at FROM (
        SELECT c.zone, CASE WHEN c.days > 0 THEN date '1970-01-01' + (p_nth * c.days + c.first)::integer
            ELSE least(c.month + c.first - 1, (c.month + interval '1 month')::date - 1) END AS day
        FROM (SELECT p[1]::integer AS days, p[4]::integer AS first, p[5] AS zone,
            (timestamp '1970-01-01' + make_interval(months => (p[3]::integer - 1 + p_nth * p[2]::integer)::integer))::date AS month
            FROM string_to_array(p_calendar, ' ') AS p) AS c) AS d) AS m
$$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.calendar_begin FROM PUBLIC;

-- calendar_nth returns the number of the window at p_at_us.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.calendar_nth(p_calendar text, p_at_us bigint) RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_nth bigint := (p_at_us - ratelimit.calendar_begin(p_calendar, 0))
        / (split_part(p_calendar, ' ', 1)::bigint * 86400000000 + split_part(p_calendar, ' ', 2)::bigint * 2629746000000);
BEGIN
    WHILE ratelimit.calendar_begin(p_calendar, v_nth) > p_at_us LOOP
        v_nth := v_nth - 1;
    END LOOP;
    WHILE ratelimit.calendar_begin(p_calendar, v_nth + 1) <= p_at_us LOOP
        v_nth := v_nth + 1;
    END LOOP;
    RETURN v_nth;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.calendar_nth FROM PUBLIC;

-- steps_between returns how many steps begin after p_from_us and up to p_until_us. A policy that takes effect at p_since_us begins one.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.steps_between(p_calendar text, p_step_us bigint, p_phase_us bigint, p_since_us bigint, p_from_us bigint, p_until_us bigint) RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF p_calendar IS NOT NULL THEN
        RETURN greatest(ratelimit.calendar_nth(p_calendar, p_until_us) - ratelimit.calendar_nth(p_calendar, p_from_us), 0);
    END IF;
    RETURN (greatest(greatest(p_phase_us + (p_until_us - p_phase_us) / p_step_us * p_step_us, p_since_us) - p_from_us, 0) + p_step_us - 1) / p_step_us;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.steps_between FROM PUBLIC;

-- eras_of returns the policies of a key up to p_now_us: the one in effect, and the 16 before it. An override takes the place of rules for a time.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.eras_of(p_name text, p_key text, p_plan text, p_now_us bigint) RETURNS SETOF ratelimit.compiled_rules
LANGUAGE plpgsql STABLE SET extra_float_digits = 1 AS $$
DECLARE
    v_spans jsonb  := (SELECT k.spans FROM ratelimit.compiled_keys AS k WHERE k.name = p_name AND k.key = p_key);
    v_last  bigint := (SELECT max(c.last_us) FROM ratelimit.compiled_rules AS c WHERE c.name = p_name);
BEGIN
    IF v_spans IS NULL THEN
        RETURN QUERY SELECT c.* FROM ratelimit.compiled_rules AS c
            WHERE c.name = p_name AND c.since_us <= p_now_us
                AND c.plan = CASE WHEN EXISTS (SELECT FROM ratelimit.compiled_rules AS p WHERE p.name = p_name AND p.plan = p_plan) THEN p_plan ELSE '' END
            ORDER BY c.since_us DESC LIMIT 17;
        RETURN;
    END IF;
    RETURN QUERY
        SELECT e.name, e.plan, e.since_us, e.last_us, e.rule, e.mode, e.change, false, true, n.says, n.kind, n.capacity, n.rate, n.steps, n.step_us, n.phase_us, n.slices,
            n.max_owed, n.lease_us, n.shards, n.calendar
        FROM (
            SELECT c.name, c.plan, greatest(c.since_us, s.from_us) AS since_us, coalesce(lead(greatest(c.since_us, s.from_us)) OVER (ORDER BY s.from_us, c.since_us) - 1, v_last) AS last_us,
                CASE WHEN s.says ?| '{policy,multiplier}' THEN p_name || ', override' ELSE c.rule END AS rule,
                CASE WHEN s.says ? 'policy' THEN coalesce(s.says ->> 'mode', 'on') ELSE c.mode END AS mode,
                CASE WHEN c.since_us > s.from_us AND NOT s.says ? 'policy' THEN c.change WHEN s.from_us > -9223372036854775808 THEN s.says ->> 'on_change' END AS change,
                CASE WHEN s.says ? 'policy' THEN s.says -> 'policy' WHEN s.says ? 'multiplier' THEN ratelimit.scale_policy(c.says, (s.says ->> 'multiplier')::float8) ELSE c.says END AS says
            FROM jsonb_to_recordset(v_spans) AS s (from_us bigint, until_us bigint, says jsonb)
            CROSS JOIN LATERAL (SELECT coalesce(s.says ->> 'on_plan', p_plan) AS plan) AS o
            JOIN ratelimit.compiled_rules AS c ON c.name = p_name AND c.since_us < s.until_us AND c.last_us >= s.from_us
                AND c.plan = CASE WHEN EXISTS (SELECT FROM ratelimit.compiled_rules AS p WHERE p.name = p_name AND p.plan = o.plan) THEN o.plan ELSE '' END
                AND (NOT s.says ? 'policy' OR c.since_us <= s.from_us)
        ) AS e CROSS JOIN LATERAL ratelimit.compile_policy(e.says) AS n
        WHERE e.since_us <= p_now_us ORDER BY e.since_us DESC LIMIT 17;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.eras_of FROM PUBLIC;

-- terms_of returns the policy of a request at p_now_us. p_seen_us is the ts of a row that another policy may have written. p_own is the
-- policy of a reservation whose limit has no rule any more.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.terms_of(p_name text, p_key text, p_plan text, p_cost float8, p_now_us bigint, p_seen_us bigint, p_own ratelimit.compiled_rules DEFAULT NULL)
RETURNS ratelimit.terms
LANGUAGE plpgsql AS $$
DECLARE
    t        ratelimit.terms;
    c        ratelimit.compiled_rules; -- the policy in effect
    w        ratelimit.compiled_rules; -- the one of the row
    v_eras   ratelimit.compiled_rules[];
    v_hashed boolean;
    v_change text; -- to the policy in effect
    v_nth    bigint;
BEGIN
    SELECT array_agg(e ORDER BY e.since_us DESC) INTO v_eras FROM ratelimit.eras_of(p_name, p_key, coalesce(p_plan, ''), p_now_us) AS e WHERE p_own.name IS NULL;
    IF p_own.name IS NOT NULL THEN
        v_eras := ARRAY[p_own];
    END IF;
    c := v_eras[1];
    SELECT f.hash_key <> 'none' INTO v_hashed FROM ratelimit.fingerprint AS f;
    IF (c.last_us >= p_now_us) IS NOT TRUE THEN
        RAISE EXCEPTION 'ratelimit: no rule is stored for the limit %', coalesce(quote_literal(left(p_name, 80)), 'NULL') USING ERRCODE = 'undefined_object',
            HINT = 'Store one with "ratelimit rules apply". A limit that only a program defines has no rule, so SQL cannot see it.';
    ELSIF octet_length(p_plan) > 256 THEN
        RAISE EXCEPTION 'ratelimit: the plan of % has % bytes; a plan has up to 256', quote_literal(p_name), octet_length(p_plan) USING ERRCODE = 'invalid_parameter_value';
    ELSIF octet_length(p_key) > 256 THEN
        RAISE EXCEPTION 'ratelimit: the key of % has % bytes; a key has up to 256', quote_literal(p_name), octet_length(p_key) USING ERRCODE = 'invalid_parameter_value';
    ELSIF v_hashed AND p_key <> '' AND p_key !~ '^[A-Za-z0-9_-]{43}$' THEN
        RAISE EXCEPTION 'ratelimit: keys are hashed in this database, and it does not have the secret' USING ERRCODE = 'invalid_parameter_value',
            HINT = 'Pass the stored key, 43 characters, as Limiter.StoredKey of a program with the secret returns it.';
    ELSIF c.capacity IS NULL OR c.shards > 1 THEN
        RAISE EXCEPTION 'ratelimit: the limit % is a % with % shards, and SQL cannot decide on that', quote_literal(p_name), c.kind, coalesce(c.shards, 1)
            USING ERRCODE = 'feature_not_supported', HINT = 'Give the rule a kind that this version knows, and no shards, or decide in a program.';
    ELSIF (p_cost >= 0 AND p_cost < 'Infinity') IS NOT TRUE OR p_cost > 0 AND p_cost < greatest(c.capacity * 9.094947017729282e-13, 1e-9) THEN
        RAISE EXCEPTION 'ratelimit: the cost for % is %', quote_literal(p_name), coalesce(p_cost::text, 'NULL') USING ERRCODE = 'numeric_value_out_of_range',
            HINT = format('Pass a number of tokens, 0 or from %s on.', greatest(c.capacity * 9.094947017729282e-13, 1e-9));
    END IF;
    IF v_hashed IS NULL AND current_setting('transaction_read_only') = 'off' THEN -- the first call of all
        INSERT INTO ratelimit.fingerprint (hash_key) VALUES ('none') ON CONFLICT DO NOTHING;
    END IF;

    t.name := p_name; t.key := p_key; t.plan := coalesce(p_plan, ''); t.cost := p_cost; t.lowest := 0; t.rule := c.rule; t.mode := c.mode; t.kind := c.kind;
    t.capacity := c.capacity; t.rate := c.rate; t.steps := c.steps; t.slices := c.slices; t.max_owed := c.max_owed; t.lease_us := c.lease_us; t.calendar := c.calendar;
    t.step_us := c.step_us; t.phase_us := coalesce(c.phase_us, ratelimit.seeded_phase(p_name, p_key, c.step_us));
    t.from_us := c.since_us; t.since_us := c.since_us; t.last_us := c.last_us; t.now_us := p_now_us;
    IF c.calendar IS NOT NULL THEN -- the window of now
        v_nth := ratelimit.calendar_nth(c.calendar, p_now_us);
        t.since_us := greatest(c.since_us, ratelimit.calendar_begin(c.calendar, v_nth)); t.last_us := least(c.last_us, ratelimit.calendar_begin(c.calendar, v_nth + 1) - 1);
        t.step_us := ratelimit.calendar_begin(c.calendar, v_nth + 1) - ratelimit.calendar_begin(c.calendar, v_nth);
        t.phase_us := ratelimit.phase_from(ratelimit.calendar_begin(c.calendar, v_nth), t.step_us);
    END IF;
    IF c.keyed THEN
        SELECT max(upper(r)) INTO t.paused_us FROM ratelimit.compiled_keys AS k, unnest(k.paused) AS r WHERE k.name = p_name AND k.key IN (p_key, '') AND r @> p_now_us;
    END IF;

    t.reset_us := -9223372036854775808;
    FOR i IN REVERSE cardinality(v_eras) - 1 .. 1 LOOP -- to each policy from the one before
        w := v_eras[i];
        v_change := CASE WHEN w.kind <> (v_eras[i + 1]).kind OR w.shards <> (v_eras[i + 1]).shards THEN 'reset'
            ELSE coalesce(w.change, CASE w.kind WHEN 'token bucket' THEN 'keep' ELSE 'carry' END) END;
        IF v_change = 'reset' THEN
            t.reset_us := w.since_us;
        END IF;
    END LOOP;
    IF p_seen_us < t.since_us THEN
        t.past := jsonb_build_object('from_us', t.from_us, 'seen_us', p_seen_us,
            'passed', ratelimit.steps_between(t.calendar, t.step_us, t.phase_us, t.from_us, greatest(p_seen_us, t.from_us), t.since_us));
        IF p_seen_us < t.reset_us THEN
            t.past := t.past || '{"change": "reset"}';
        ELSIF p_seen_us < t.from_us THEN
            SELECT e.* INTO w FROM unnest(v_eras) AS e ORDER BY e.since_us > p_seen_us, abs(e.since_us::numeric - p_seen_us) LIMIT 1;
            t.past := t.past || ratelimit.past_columns(w, v_change, coalesce(w.phase_us, ratelimit.seeded_phase(p_name, p_key, w.step_us)), p_seen_us, t.from_us);
        END IF;
    END IF;
    RETURN t;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.terms_of FROM PUBLIC;

-- past_columns returns the columns of decide_rows_1 about the policy of a row.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.past_columns(w ratelimit.compiled_rules, p_change text, p_phase_us bigint, p_seen_us bigint, p_from_us bigint) RETURNS jsonb
LANGUAGE plpgsql STABLE SET extra_float_digits = 1 AS $$
BEGIN
    RETURN jsonb_build_object('change', p_change, 'was_capacity', w.capacity, 'was_rate', w.rate, 'was_steps', w.steps, 'was_slices', w.slices, 'was_step_us', w.step_us,
        'was_phase_us', p_phase_us, 'was_passed', ratelimit.steps_between(w.calendar, w.step_us, p_phase_us, w.since_us, p_seen_us, p_from_us));
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.past_columns FROM PUBLIC;

-- credit_until returns the begin of the last step in which tokens can be given back that were paid at t.paid_us.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.credit_until(t ratelimit.terms) RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_begin bigint := t.phase_us + (t.paid_us - t.phase_us) / t.step_us * t.step_us;
    v_next  bigint := v_begin + t.step_us;
BEGIN
    IF t.calendar IS NOT NULL THEN
        v_begin := ratelimit.calendar_begin(t.calendar, ratelimit.calendar_nth(t.calendar, t.paid_us));
        v_next := ratelimit.calendar_begin(t.calendar, ratelimit.calendar_nth(t.calendar, t.paid_us) + 1);
    END IF;
    RETURN CASE WHEN t.paid_us < t.reset_us THEN -62135596800000000 WHEN t.paid_us IS NULL OR t.step_us = 1 THEN 253402300799999999
        WHEN v_begin < t.from_us AND v_next > t.from_us THEN t.from_us ELSE v_begin END;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.credit_until FROM PUBLIC;

-- asks_of returns requests as decide_rows_1 has them, or reserve_rows_1.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.asks_of(p_terms ratelimit.terms[], p_verb text) RETURNS jsonb
LANGUAGE sql STABLE SET extra_float_digits = 1 AS $$
    SELECT jsonb_agg(jsonb_build_object('name', t.name, 'key', t.key, 'shard', coalesce(t.shard, 0), 'same', false, 'verb', CASE p_verb WHEN 'reserve' THEN 'take' ELSE p_verb END,
        'amount', t.cost, 'lowest', CASE p_verb WHEN 'look' THEN 1e300 ELSE t.lowest END, 'most', coalesce(t.most, 0), 'until_us', ratelimit.credit_until(t), 'capacity', t.capacity, 'rate', t.rate, 'steps', t.steps, 'slices', t.slices, 'step_us', t.step_us, 'phase_us', t.phase_us,
        'lease_us', t.lease_us, 'fence', t.fence, 'since_us', t.since_us, 'last_us', t.last_us) || coalesce(t.past, '{}') || CASE p_verb WHEN 'reserve' THEN
            jsonb_build_object('plan', nullif(t.plan, ''), 'calendar', t.calendar, 'waits', t.mode = 'on', 'next_us', CASE WHEN t.calendar IS NOT NULL THEN (
                SELECT jsonb_agg(ratelimit.calendar_begin(t.calendar, ratelimit.calendar_nth(t.calendar, t.since_us) + n) ORDER BY n) FROM generate_series(1, 2) AS n) END)
            ELSE '{}' END ORDER BY t.name COLLATE "C", t.key COLLATE "C")
    FROM unnest(p_terms) AS t
$$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.asks_of FROM PUBLIC;

-- decide has requests decided, in the order of the primary key: by decide_1, and what it leaves undecided by decide_rows_1. It returns them
-- with the answers. p_verb is one of decide_rows_1, or look, which takes nothing and locks nothing, or reserve, with the id of a reservation.
-- p_own is as in terms_of.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.decide(p_terms ratelimit.terms[], p_verb text, p_id uuid DEFAULT NULL, p_own ratelimit.compiled_rules DEFAULT NULL) RETURNS ratelimit.terms[]
LANGUAGE plpgsql AS $$
DECLARE
    t        ratelimit.terms := p_terms[1];
    v_row    record;
    v_now    bigint;
    v_as_of  bigint;
    v_asks   jsonb;
    v_others boolean; -- whether not all are of the kinds of decide_1
    n        integer := 0;
BEGIN
    IF p_verb = 'take' THEN
        SELECT bool_or(a.slices IS NOT NULL OR a.lease_us IS NOT NULL OR a.cost = 0) INTO v_others FROM unnest(p_terms) AS a;
        FOR v_row IN SELECT d.* FROM (SELECT array_agg(a.name) AS name, array_agg(a.key) AS key, array_agg(0) AS shard, array_agg(a.cost) AS cost, array_agg(a.capacity) AS capacity,
                array_agg(a.rate) AS rate, array_agg(a.steps) AS steps, array_agg(a.step_us) AS step, array_agg(a.phase_us) AS phase, array_agg(a.lowest) AS lowest,
                array_agg(a.since_us) AS since, array_agg(a.last_us) AS last FROM unnest(p_terms) AS a WHERE NOT v_others HAVING count(*) > 0) AS a,
            ratelimit.decide_1(a.name, a.key, a.shard, a.cost, a.capacity, a.rate, a.steps, a.step, a.phase, a.lowest, a.since, a.last, NULL) AS d
        LOOP
            n := n + 1;
            t := p_terms[n];
            t.allowed := v_row.allowed; t.value := v_row.value; t.ts := v_row.ts; t.held := v_row.capacity; t.now_us := v_row.now_us;
            p_terms[n] := t;
        END LOOP;
    END IF;

    FOR v_round IN 1 .. 16 LOOP
        IF (p_terms[1]).allowed IS NOT NULL THEN
            RETURN p_terms;
        END IF;
        v_now := t.now_us;
        FOREACH t IN ARRAY p_terms LOOP -- a policy that begins within a minute has written a row: the request is of its first microsecond
            IF t.ts > t.last_us AND t.ts <= v_now + 60000000 THEN
                v_now := greatest(v_now, (ratelimit.terms_of(t.name, t.key, t.plan, 0, t.ts, NULL, p_own)).since_us);
                v_as_of := v_now;
            END IF;
        END LOOP;
        FOR i IN 1 .. cardinality(p_terms) LOOP
            t := ratelimit.terms_of(p_terms[i].name, p_terms[i].key, p_terms[i].plan, 0, v_now, p_terms[i].ts, p_own);
            t.shard := p_terms[i].shard; t.cost := p_terms[i].cost; t.lowest := p_terms[i].lowest; t.fence := p_terms[i].fence;
            t.most := p_terms[i].most; t.paid_us := p_terms[i].paid_us;
            IF (t.kind = 'concurrency') <> (p_terms[i].kind = 'concurrency') THEN
                RAISE EXCEPTION 'ratelimit: the limit % has become a % during the call', quote_literal(t.name), t.kind USING ERRCODE = 'serialization_failure', HINT = 'Call again.';
            END IF;
            p_terms[i] := t;
        END LOOP;
        v_asks := ratelimit.asks_of(p_terms, p_verb); -- look is refused, so decide_rows_1 only looks
        n := 0;
        FOR v_row IN
            SELECT d.allowed, d.value, d.ts, d.capacity, d.taken, d.leases, d.now_us, NULL::bigint AS ready_us
            FROM ratelimit.decide_rows_1(v_asks, v_as_of, NULL, 0, p_verb = 'look', false) AS d WHERE p_id IS NULL
            UNION ALL SELECT d.allowed, d.value, d.ts, d.capacity, d.taken, NULL, d.now_us, d.ready_us
            FROM ratelimit.reserve_rows_1(v_asks, v_as_of, NULL, 0, false, p_id, CASE WHEN t.paused_us > t.now_us THEN t.paused_us ELSE 0 END, NULL, 86400000000, false,
                NULL, NULL, NULL, NULL, false) AS d WHERE p_id IS NOT NULL
        LOOP
            n := n + 1;
            t := p_terms[n];
            t.allowed := v_row.allowed; t.value := v_row.value; t.ts := v_row.ts; t.held := v_row.capacity; t.taken := v_row.taken; t.leases := v_row.leases;
            t.now_us := v_row.now_us; t.ready_us := v_row.ready_us;
            p_terms[n] := t;
        END LOOP;
    END LOOP;
    RAISE EXCEPTION 'ratelimit: the rules or the rows have changed each time that the call was decided' USING ERRCODE = 'serialization_failure', HINT = 'Call again.';
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.decide FROM PUBLIC;

-- told returns a request with what its answer says: remaining and retry_us, after a decision on a bucket of tokens.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.told(t ratelimit.terms) RETURNS ratelimit.terms
LANGUAGE plpgsql STABLE AS $$
DECLARE
    c_horizon CONSTANT bigint := 7884000000000000; -- 250 years
    v_begun  bigint := greatest(t.phase_us + (t.now_us - t.phase_us) / t.step_us * t.step_us, t.since_us);
    v_ts     bigint := CASE WHEN t.ts > t.now_us + 60000000 THEN v_begun ELSE t.ts END; -- a wrong clock has written it
    v_n      bigint;
    v_most   bigint;
    v_length bigint;
    v_row    float8[] := t.taken[3:]; -- totals, as in slide_1
    v_totals float8[];
    v_end    bigint;
BEGIN
    t.retry_us := 0;
    IF t.slices IS NULL THEN
        v_n := ratelimit.steps_between(t.calendar, t.step_us, t.phase_us, t.since_us, v_ts, t.now_us);
        t.remaining := least(t.capacity, t.value + v_n::float8 * t.rate / t.steps);
        IF t.remaining - t.cost >= t.lowest OR t.allowed THEN
            RETURN t;
        ELSIF NOT t.capacity - t.cost >= t.lowest THEN
            t.retry_us := c_horizon;
            RETURN t;
        END IF;
        v_most := v_n + c_horizon / t.step_us + 2;
        v_n := least(greatest(ceil((t.cost + t.lowest - t.value) * t.steps / t.rate), 1), v_most)::bigint;
        WHILE v_n > 1 AND least(t.capacity, t.value + (v_n - 1)::float8 * t.rate / t.steps) - t.cost >= t.lowest LOOP
            v_n := v_n - 1;
        END LOOP;
        WHILE v_n < v_most AND NOT least(t.capacity, t.value + v_n::float8 * t.rate / t.steps) - t.cost >= t.lowest LOOP
            v_n := v_n + 1;
        END LOOP;
        t.retry_us := least(CASE WHEN v_n = v_most THEN c_horizon
            WHEN t.calendar IS NOT NULL THEN ratelimit.calendar_begin(t.calendar, ratelimit.calendar_nth(t.calendar, v_ts) + v_n) - t.now_us
            ELSE t.phase_us + (v_ts - t.phase_us) / t.step_us * t.step_us + v_n * t.step_us - t.now_us END, c_horizon);
        RETURN t;
    END IF;

    v_length := CASE WHEN t.taken[2] = t.value AND t.taken[1] BETWEEN 1 AND 3155760000000000 THEN t.taken[1]::bigint ELSE t.step_us END;
    IF (t.taken[2] = t.value) IS NOT TRUE THEN -- another kind has written it
        v_row := ARRAY[least(greatest(0, t.held - t.value), 1e300), 0];
    END IF;
    v_totals := (ratelimit.totals_1(v_row, v_length, v_ts, t.capacity, t.slices, t.step_us, t.phase_us, t.now_us, NULL)).totals;
    t.remaining := t.capacity - (v_totals[1] - v_totals[least(t.slices + 2, cardinality(v_totals))]);
    IF t.allowed OR t.capacity - (v_totals[1] + t.cost - v_totals[least(t.slices + 2, cardinality(v_totals))]) >= t.lowest THEN
        RETURN t;
    ELSIF NOT t.capacity - t.cost >= t.lowest THEN
        t.retry_us := c_horizon;
    ELSIF v_length = t.step_us THEN -- until enough slices have fallen out
        v_n := 0;
        WHILE v_n <= t.slices AND NOT t.capacity - (v_totals[1] + t.cost - v_totals[least(t.slices + 2 - v_n, cardinality(v_totals))]) >= t.lowest LOOP
            v_n := v_n + 1;
        END LOOP;
        t.retry_us := least(t.phase_us + (greatest(v_ts, v_begun) - t.phase_us) / t.step_us * t.step_us + v_n * t.step_us,
            t.phase_us + (v_ts - t.phase_us) / t.step_us * t.step_us + (t.slices + 1) * t.step_us) - t.now_us;
    ELSE -- until enough slices of another length have ended
        v_end := t.now_us;
        FOR i IN REVERSE cardinality(v_row) - 2 .. 0 LOOP
            v_totals := (ratelimit.totals_1(v_row, v_length, v_ts, t.capacity, t.slices, t.step_us, t.phase_us, v_end, NULL)).totals;
            EXIT WHEN t.capacity - (v_totals[1] + t.cost - v_totals[least(t.slices + 2, cardinality(v_totals))]) >= t.lowest;
            v_most := t.phase_us + ((v_ts - t.phase_us) / v_length + 1 - i) * v_length - 1;
            v_end := greatest(v_end, t.phase_us + (v_most - t.phase_us) / t.step_us * t.step_us + (t.slices + 1) * t.step_us);
        END LOOP;
        t.retry_us := least(v_end - t.now_us, c_horizon);
    END IF;
    RETURN t;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.told FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.told, ratelimit.decide, ratelimit.asks_of, ratelimit.credit_until, ratelimit.past_columns, ratelimit.terms_of, ratelimit.eras_of,
    ratelimit.steps_between, ratelimit.calendar_nth, ratelimit.calendar_begin, ratelimit.seeded_phase;
DROP TYPE ratelimit.terms;
