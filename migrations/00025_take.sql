-- +goose Up
-- The functions for people that take tokens under the stored rules (docs/sql.md). Their signatures don't change once they are released. They
-- have the clock of the server, and decide in the transaction of the caller: a rollback gives everything back.
CREATE TYPE ratelimit.decision AS (allowed boolean, remaining float8, retry_after float8, rule text, mode text);
COMMENT ON TYPE ratelimit.decision IS 'allowed: go on. remaining: tokens left, never below 0. retry_after: seconds until the same call would be allowed; null if it was, but in the mode shadow the wait of a refusal that was only noted. rule: what decided, such as "messages, plan pro". mode: on, shadow, off, or paused.';

-- checked_key returns the key, or an error that says what to pass.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.checked_key(p_name text, p_key text) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_key <> '' THEN
        RETURN p_key;
    END IF;
    RAISE EXCEPTION 'ratelimit: the key for % is %', coalesce(quote_literal(left(p_name, 80)), 'NULL'), CASE WHEN p_key IS NULL THEN 'NULL' ELSE 'empty' END
        USING ERRCODE = 'invalid_parameter_value', HINT = 'Pass who the tokens belong to, such as user_id::text. For one bucket for everybody, call take_global, or give take_all "global": true.';
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.checked_key FROM PUBLIC;

-- take_from takes from each of several buckets, all or nothing, as take and take_all say. p_verb is take or look.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.take_from(p_terms ratelimit.terms[], p_verb text) RETURNS ratelimit.terms[]
LANGUAGE plpgsql AS $$
DECLARE
    t        ratelimit.terms;
    v_asked  ratelimit.terms[] := '{}'; -- those that are still to decide on
    v_done   ratelimit.terms[] := '{}';
    v_paused boolean := (SELECT bool_or(a.paused_us > a.now_us) FROM unnest(p_terms) AS a);
    v_ended  boolean := true;
BEGIN
    FOREACH t IN ARRAY p_terms LOOP
        IF t.kind = 'concurrency' THEN
            RAISE EXCEPTION 'ratelimit: the limit % gives slots, not tokens', quote_literal(t.name) USING ERRCODE = 'feature_not_supported', HINT = 'Call acquire, and release.';
        ELSIF t.cost > t.capacity AND t.mode = 'on' AND v_paused IS NOT TRUE THEN
            RAISE EXCEPTION 'ratelimit: the cost for % is %, and its capacity is %', quote_literal(t.name), t.cost, t.capacity USING ERRCODE = 'numeric_value_out_of_range',
                HINT = 'Pass at most its capacity at once, or give the rule a larger one.';
        ELSIF v_paused IS TRUE OR t.mode = 'off' OR t.cost > t.capacity THEN
            t.allowed := coalesce(t.paused_us <= t.now_us, true) AND (v_paused IS TRUE OR t.mode = 'off');
            t.remaining := CASE WHEN t.mode = 'off' AND v_paused IS NOT TRUE THEN t.capacity ELSE 0 END; -- beside a pause none is asked
            t.retry_us := CASE WHEN t.allowed THEN 0 WHEN t.paused_us > t.now_us THEN least(t.paused_us - t.now_us, 7884000000000000) ELSE 7884000000000000 END;
            t.mode := CASE WHEN t.paused_us > t.now_us THEN 'paused' ELSE t.mode END;
            v_done := v_done || t;
        ELSE
            v_asked := v_asked || t;
        END IF;
    END LOOP;
    WHILE cardinality(v_asked) > 0 LOOP
        SELECT p_verb = 'look' OR bool_and(a.cost = 0) INTO v_ended FROM unnest(v_asked) AS a;
        v_asked := ratelimit.decide(v_asked, CASE WHEN v_ended THEN 'look' ELSE p_verb END);
        FOR i IN 1 .. cardinality(v_asked) LOOP
            t := ratelimit.told(v_asked[i]);
            t.allowed := t.allowed OR v_ended AND t.retry_us = 0;
            v_asked[i] := t;
        END LOOP;
        -- What refuses in the mode shadow is left out, and the others are asked again.
        SELECT v_ended OR bool_or(NOT a.allowed AND a.mode = 'on') OR bool_and(a.allowed) INTO v_ended FROM unnest(v_asked) AS a;
        v_done := v_done || ARRAY(SELECT a FROM unnest(v_asked) AS a WHERE v_ended OR NOT a.allowed);
        v_asked := ARRAY(SELECT a FROM unnest(v_asked) AS a WHERE NOT v_ended AND a.allowed);
        FOR i IN 1 .. cardinality(v_asked) LOOP
            t := v_asked[i];
            t.allowed := NULL;
            v_asked[i] := t;
        END LOOP;
    END LOOP;
    RETURN v_done;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.take_from FROM PUBLIC;

-- +goose StatementBegin
CREATE FUNCTION ratelimit.decision_of(t ratelimit.terms) RETURNS ratelimit.decision
LANGUAGE sql IMMUTABLE AS $$
    SELECT (t.allowed OR t.mode = 'shadow', greatest(t.remaining, 0), CASE WHEN NOT t.allowed THEN t.retry_us / 1e6::float8 END, t.rule, t.mode)::ratelimit.decision
$$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.decision_of FROM PUBLIC;

-- take_generally is take for any key, also the empty one of the bucket for everybody.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.take_generally(p_name text, p_key text, p_cost float8, p_plan text, p_verb text) RETURNS ratelimit.decision
LANGUAGE plpgsql AS $$ BEGIN RETURN ratelimit.decision_of((ratelimit.take_from(ARRAY[ratelimit.terms_of(p_name, p_key, p_plan, p_cost, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, NULL)], p_verb))[1]); END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.take_generally FROM PUBLIC;

-- Mostly one row of the compiled rules has all that take_1 or slide_1 needs. What is rare is left to take_generally: overrides and pauses, another
-- mode, calendars, bad arguments, and rows of an earlier policy.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.take(name text, key text, cost float8 DEFAULT 1, plan text DEFAULT NULL) RETURNS ratelimit.decision
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_now bigint := (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;
    v_plain boolean; v_rule text; v_since bigint; v_last bigint; v_capacity float8; v_rate float8; v_steps float8; v_step bigint; v_phase bigint; v_slices integer;
    v_allowed boolean; v_value float8; v_ts bigint; v_held float8; v_taken float8[]; v_at bigint;
    t ratelimit.terms;
BEGIN
    SELECT c.plain AND NOT c.keyed AND c.last_us >= v_now AND (SELECT f.hash_key FROM ratelimit.fingerprint AS f) = 'none', c.rule, c.since_us, c.last_us, c.capacity, c.rate, c.steps,
        c.step_us, c.phase_us, c.slices
    INTO v_plain, v_rule, v_since, v_last, v_capacity, v_rate, v_steps, v_step, v_phase, v_slices
    FROM ratelimit.compiled_rules AS c WHERE c.name = $1 AND c.plan = coalesce($4, '') AND c.since_us <= v_now ORDER BY c.since_us DESC LIMIT 1;
    IF v_plain AND $2 <> '' AND octet_length($2) <= 256 AND $3 <= v_capacity AND $3 >= greatest(v_capacity * 9.094947017729282e-13, 1e-9) THEN
        IF v_slices IS NULL THEN
            IF v_phase IS NULL THEN
                v_phase := ratelimit.seeded_phase($1, $2, v_step);
            END IF;
            SELECT d.allowed, d.value, d.ts, d.capacity, d.now_us INTO v_allowed, v_value, v_ts, v_held, v_at
            FROM ratelimit.take_1($1, $2, 0, $3, v_capacity, v_rate, v_steps, v_step, v_phase, 0, v_since, v_last, NULL, false, false) AS d;
        ELSE
            SELECT d.allowed, d.value, d.ts, d.capacity, d.taken, d.now_us INTO v_allowed, v_value, v_ts, v_held, v_taken, v_at
            FROM ratelimit.slide_1($1, $2, 0, $3, v_capacity, v_slices, v_step, v_phase, 0, v_since, v_last, NULL, false, false) AS d;
        END IF;
        IF v_allowed AND v_slices IS NULL THEN
            RETURN (true, greatest(v_value, 0), NULL, v_rule, 'on')::ratelimit.decision;
        ELSIF v_allowed IS NOT NULL THEN
            t.capacity := v_capacity; t.rate := v_rate; t.steps := v_steps; t.step_us := v_step; t.phase_us := v_phase; t.slices := v_slices; t.since_us := v_since; t.cost := $3;
            t.lowest := 0; t.rule := v_rule; t.mode := 'on'; t.allowed := v_allowed; t.value := v_value; t.ts := v_ts; t.held := v_held; t.taken := v_taken; t.now_us := v_at;
            RETURN ratelimit.decision_of(ratelimit.told(t));
        END IF;
    END IF;
    RETURN ratelimit.take_generally($1, ratelimit.checked_key($1, $2), $3, $4, 'take');
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.take FROM PUBLIC;
COMMENT ON FUNCTION ratelimit.take IS 'Takes tokens: SELECT * FROM ratelimit.take(''messages'', user_id::text). Call it in FROM: (ratelimit.take(..)).* in the select list takes once for each column. A rollback gives the tokens back. The row of the key stays locked until the transaction ends, so call it late.';

-- +goose StatementBegin
CREATE FUNCTION ratelimit.take_global(name text, cost float8 DEFAULT 1, plan text DEFAULT NULL) RETURNS ratelimit.decision
LANGUAGE plpgsql AS $$ BEGIN RETURN ratelimit.take_generally($1, '', $2, $3, 'take'); END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.take_global FROM PUBLIC;
COMMENT ON FUNCTION ratelimit.take_global IS 'Takes tokens from the one bucket of a limit that everybody shares: SELECT * FROM ratelimit.take_global(''signups'').';

-- +goose StatementBegin
CREATE FUNCTION ratelimit.check(name text, key text, cost float8 DEFAULT 1, plan text DEFAULT NULL) RETURNS ratelimit.decision
LANGUAGE plpgsql AS $$ BEGIN RETURN ratelimit.take_generally($1, ratelimit.checked_key($1, $2), $3, $4, 'look'); END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.check FROM PUBLIC;
COMMENT ON FUNCTION ratelimit.check IS 'Whether take would be allowed now: SELECT * FROM ratelimit.check(''messages'', user_id::text). It takes nothing and locks nothing, so another transaction can be quicker.';

-- refuse raises the error of a refusal.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.refuse(p_name text, d ratelimit.decision) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'ratelimit: the limit % is exceeded', quote_literal(p_name) USING ERRCODE = 'PT429',
        DETAIL = json_build_object('limit', p_name, 'rule', d.rule, 'remaining', d.remaining, 'retry_after', d.retry_after)::text,
        HINT = 'Roll back, and try again after retry_after seconds.';
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.refuse FROM PUBLIC;

-- +goose StatementBegin
CREATE FUNCTION ratelimit.require(name text, key text, cost float8 DEFAULT 1, plan text DEFAULT NULL) RETURNS ratelimit.decision
LANGUAGE plpgsql AS $$
DECLARE
    d ratelimit.decision := ratelimit.take($1, $2, $3, $4);
BEGIN
    IF d.allowed IS NOT TRUE THEN
        PERFORM ratelimit.refuse($1, d);
    END IF;
    RETURN d;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.require FROM PUBLIC;
COMMENT ON FUNCTION ratelimit.require IS 'As take, but a refusal is an error with SQLSTATE PT429 and a JSON object in DETAIL: {"limit", "rule", "remaining", "retry_after"}. Your transaction rolls back with it.';

-- +goose StatementBegin
CREATE FUNCTION ratelimit.take_all(requests jsonb) RETURNS SETOF ratelimit.decision
LANGUAGE plpgsql AS $$
DECLARE
    v_now     bigint := (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;
    v_bad     jsonb;
    v_request record;
    v_terms   ratelimit.terms[] := '{}';
BEGIN
    IF (CASE jsonb_typeof(requests) WHEN 'array' THEN jsonb_array_length(requests) BETWEEN 1 AND 64 END) IS NOT TRUE THEN
        RAISE EXCEPTION 'ratelimit: the requests of take_all are %', coalesce(left(requests::text, 80), 'NULL') USING ERRCODE = 'invalid_parameter_value',
            HINT = 'Pass an array of 1 to 64 objects, such as [{"name": "messages", "key": "ana", "cost": 1, "plan": "pro"}].';
    END IF;
    SELECT e.v INTO v_bad FROM jsonb_array_elements(requests) AS e (v)
    WHERE CASE jsonb_typeof(e.v) WHEN 'object' THEN EXISTS (SELECT FROM jsonb_each(e.v) AS f WHERE NOT CASE f.key WHEN 'cost' THEN jsonb_typeof(f.value) = 'number'
        WHEN 'global' THEN f.value = 'false' OR f.value = 'true' AND e.v ->> 'key' IS NULL
        ELSE f.key IN ('name', 'key', 'plan') AND jsonb_typeof(f.value) IN ('string', 'null') END) ELSE true END LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'ratelimit: take_all cannot read the request %', left(v_bad::text, 200) USING ERRCODE = 'invalid_parameter_value',
            HINT = 'A request has a name and either a key or "global": true, and may have a cost (a number) and a plan.';
    END IF;
    FOR v_request IN
        SELECT r.name, r.key, sum(coalesce(r.cost, 1) ORDER BY r.n) AS cost, min(r.plan) AS plan, count(DISTINCT coalesce(r.plan, '')) AS plans
        FROM (SELECT x.name, CASE WHEN x.global THEN '' ELSE ratelimit.checked_key(x.name, x.key) END AS key, x.cost, x.plan, e.n
            FROM jsonb_array_elements(requests) WITH ORDINALITY AS e (v, n), jsonb_to_record(e.v) AS x (name text, key text, global boolean, cost float8, plan text)) AS r
        GROUP BY r.name, r.key ORDER BY r.name COLLATE "C", r.key COLLATE "C"
    LOOP
        IF v_request.plans > 1 THEN
            RAISE EXCEPTION 'ratelimit: take_all asks for one bucket of % on two plans', quote_literal(v_request.name) USING ERRCODE = 'invalid_parameter_value',
                HINT = 'Say which plan its key is on.';
        END IF;
        v_terms := v_terms || ratelimit.terms_of(v_request.name, v_request.key, v_request.plan, v_request.cost, v_now, NULL);
    END LOOP;
    v_terms := ratelimit.take_from(v_terms, 'take');
    RETURN QUERY SELECT d.* FROM jsonb_array_elements(requests) WITH ORDINALITY AS e (v, n) JOIN unnest(v_terms) AS t ON t.name = e.v ->> 'name' AND t.key = CASE WHEN (e.v ->> 'global')::boolean THEN '' ELSE e.v ->> 'key' END,
        ratelimit.decision_of(t) AS d ORDER BY e.n;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.take_all FROM PUBLIC;
COMMENT ON FUNCTION ratelimit.take_all IS 'Takes from all of several limits or from none, and returns a row for each: SELECT bool_and(allowed) FROM ratelimit.take_all(''[{"name": "messages", "key": "ana"}, {"name": "site", "global": true, "cost": 2}]'').';

-- change charges, credits or fills a bucket.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.change(p_name text, p_key text, p_cost float8, p_plan text, p_verb text) RETURNS ratelimit.decision
LANGUAGE plpgsql AS $$
DECLARE
    t ratelimit.terms := ratelimit.terms_of(p_name, p_key, p_plan, p_cost, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, NULL);
BEGIN
    IF t.kind = 'concurrency' AND p_verb <> 'fill' THEN
        RAISE EXCEPTION 'ratelimit: the limit % gives slots, not tokens', quote_literal(p_name) USING ERRCODE = 'feature_not_supported', HINT = 'Call acquire, and release.';
    ELSIF p_cost > 1e12 THEN
        RAISE EXCEPTION 'ratelimit: the tokens for % are %', quote_literal(p_name), p_cost USING ERRCODE = 'numeric_value_out_of_range', HINT = 'Pass up to 1e12.';
    END IF;
    t := ratelimit.told((ratelimit.decide(ARRAY[t], CASE WHEN p_verb = 'fill' OR p_cost > 0 AND t.mode <> 'off' THEN p_verb ELSE 'look' END))[1]);
    t.allowed := true;
    RETURN ratelimit.decision_of(t);
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.change FROM PUBLIC;

-- +goose StatementBegin
CREATE FUNCTION ratelimit.charge(name text, key text, tokens float8, plan text DEFAULT NULL) RETURNS ratelimit.decision
LANGUAGE plpgsql AS $$ BEGIN RETURN ratelimit.change($1, ratelimit.checked_key($1, $2), $3, $4, 'charge'); END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.charge FROM PUBLIC;
COMMENT ON FUNCTION ratelimit.charge IS 'Takes tokens even if there are too few: the bucket owes them, and later calls wait. For a cost that is known only after the work.';

-- +goose StatementBegin
CREATE FUNCTION ratelimit.credit(name text, key text, tokens float8, plan text DEFAULT NULL) RETURNS ratelimit.decision
LANGUAGE plpgsql AS $$ BEGIN RETURN ratelimit.change($1, ratelimit.checked_key($1, $2), $3, $4, 'credit'); END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.credit FROM PUBLIC;
COMMENT ON FUNCTION ratelimit.credit IS 'Gives tokens back, up to the capacity. It trusts you that they were taken, and a second call gives them again: reserve and settle if that matters.';

-- +goose StatementBegin
CREATE FUNCTION ratelimit.reset(name text, key text, plan text DEFAULT NULL) RETURNS ratelimit.decision
LANGUAGE plpgsql AS $$ BEGIN RETURN ratelimit.change($1, ratelimit.checked_key($1, $2), 0, $3, 'fill'); END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.reset FROM PUBLIC;
COMMENT ON FUNCTION ratelimit.reset IS 'Fills the bucket of a key and forgets what it owes. For operators, and after a successful login; grant it to no client.';

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.reset, ratelimit.credit, ratelimit.charge, ratelimit.change, ratelimit.take_all, ratelimit.require,
    ratelimit.refuse, ratelimit.check, ratelimit.take_global, ratelimit.take, ratelimit.take_generally, ratelimit.decision_of,
    ratelimit.take_from, ratelimit.checked_key;
DROP TYPE ratelimit.decision;
