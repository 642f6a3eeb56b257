-- +goose Up
-- The rules as decisions in SQL need them (docs/sql.md): as numbers, a row for each policy and the time at which it takes effect. Triggers on
-- the table of rules write both tables, in the transaction that changes a rule, so rows written by hand count, too. Programs in Go load the
-- rules themselves, and come to the same policies.
CREATE TABLE ratelimit.compiled_rules (
    name     text COLLATE "C" NOT NULL,
    plan     text COLLATE "C" NOT NULL, -- '': every plan without rows, and none
    since_us bigint NOT NULL, -- when it takes effect; the first one has always been in effect
    last_us  bigint NOT NULL, -- the last microsecond of that. No row follows: from then on the limit has no rule
    rule     text   NOT NULL, -- its name in decisions
    mode     text   NOT NULL,
    change   text,            -- what becomes of the tokens; null: the default
    plain    boolean NOT NULL, -- whether take_1 or slide_1 decides with these numbers, as they are
    keyed    boolean NOT NULL, -- whether the limit has rows in compiled_keys
    says     jsonb  NOT NULL, -- the policy, as in rules
    kind     text   NOT NULL, -- a kind without a capacity is of a later version
    -- As in take_1, slide_1 and acquire_1. phase_us null: the name and the key determine it. max_owed null: there are no reservations.
    capacity float8,
    rate     float8,
    steps    float8,
    step_us  bigint,
    phase_us bigint,
    slices   integer,
    max_owed float8,
    lease_us bigint,
    shards   integer,
    calendar text, -- as in reservations
    PRIMARY KEY (name, plan, since_us)
);

-- The overrides and pauses of a key. In a pause, the key '' is every key.
CREATE TABLE ratelimit.compiled_keys (
    name   text COLLATE "C" NOT NULL,
    key    text COLLATE "C" NOT NULL,
    spans  jsonb,                   -- from_us, until_us, and what is in effect then: a policy, a multiple (times) or another plan; null: no override
    paused int8multirange NOT NULL, -- when it's paused
    PRIMARY KEY (name, key)
);

-- unreadable refuses a rule or an override that was written.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.unreadable(p_says jsonb, p_why text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'ratelimit: the rule % cannot be read: %', left(p_says::text, 200), p_why USING ERRCODE = 'invalid_parameter_value';
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.unreadable FROM PUBLIC;

-- compile_number returns a field with a number, which may have to be whole. It returns null if there is no such field.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.compile_number(p_says jsonb, p_field text, p_least numeric, p_most numeric, p_whole boolean DEFAULT false) RETURNS float8
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF (CASE jsonb_typeof(p_says -> p_field) WHEN 'number' THEN (p_says ->> p_field)::numeric NOT BETWEEN p_least AND p_most OR p_whole AND p_says ->> p_field ~ '\D'
        ELSE p_says ? p_field END) THEN
        PERFORM ratelimit.unreadable(p_says, format('its %s is %s; write a %snumber from %s to %s', p_field, p_says -> p_field, CASE WHEN p_whole THEN 'whole ' END,
            p_least::float8, p_most::float8));
    END IF;
    RETURN p_says ->> p_field;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.compile_number FROM PUBLIC;

-- compile_word returns the place of a field's word in p_words. It returns null if there is no such field.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.compile_word(p_says jsonb, p_field text, p_words text[]) RETURNS integer
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF p_says ? p_field AND array_position(p_words, p_says ->> p_field) IS NULL THEN
        PERFORM ratelimit.unreadable(p_says, format('its %s is %s; write one of %s', p_field, p_says -> p_field, array_to_string(p_words, ', ')));
    END IF;
    RETURN array_position(p_words, p_says ->> p_field);
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.compile_word FROM PUBLIC;

-- compile_span returns a field with a span, in microseconds. It returns null if there is no such field.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.compile_span(p_says jsonb, p_field text, p_least bigint, p_most bigint) RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_us numeric;
BEGIN
    IF p_says ->> p_field ~ '^(second|minute|hour|day|week|\d+ (second|minute|hour|day|week)s|(\d+(\.\d*)?|\.\d+)[dw]|((\d+(\.\d*)?|\.\d+)(ns|us|\u00b5s|\u03bcs|ms|s|m|h))+)$' THEN
        SELECT sum(coalesce(nullif(m[1], ''), '1')::numeric * CASE m[2] WHEN 'ns' THEN 0.001 WHEN 'ms' THEN 1e3 WHEN 's' THEN 1e6 WHEN 'm' THEN 6e7
            WHEN 'h' THEN 36e8 WHEN 'd' THEN 864e8 WHEN 'w' THEN 6048e8 ELSE 1 END) INTO v_us
        FROM regexp_matches(p_says ->> p_field, '([\d.]*) ?(ns|us|\u00b5s|\u03bcs|ms|[smhdw])[a-z]*', 'g') AS m;
    END IF;
    IF p_says ? p_field AND (v_us BETWEEN p_least AND p_most AND v_us = trunc(v_us)) IS NOT TRUE THEN
        PERFORM ratelimit.unreadable(p_says, format('its %s is %s; write whole microseconds from %sus to %sh as a span such as 90s, 10m, 1h30m, 7d or minute',
            p_field, p_says -> p_field, p_least, p_most / 3600000000));
    END IF;
    RETURN v_us;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.compile_span FROM PUBLIC;

-- phase_from returns the first time from year 1 on that lies a whole number of steps from p_start_us.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.phase_from(p_start_us bigint, p_step_us bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT -62135596800000000 + (p_start_us % p_step_us - (-62135596800000000) % p_step_us + 2 * p_step_us) % p_step_us
$$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.phase_from FROM PUBLIC;

-- compile_policy returns the numbers of a policy, the last columns of compiled_rules. It refuses what a program would refuse.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.compile_policy(p_says jsonb) RETURNS ratelimit.compiled_rules
LANGUAGE plpgsql STABLE AS $$
DECLARE
    c        ratelimit.compiled_rules;
    v_fields text[];
    v_needs  integer := CASE p_says ->> 'kind' WHEN 'concurrency' THEN 1 ELSE 2 END;
    v_bad    text;
    v_us     bigint;
    v_most   float8;
    v_months integer;
    v_first  integer;
BEGIN
    c.says := p_says;
    c.kind := coalesce(p_says ->> 'kind', 'token bucket');
    v_fields := CASE c.kind
        WHEN 'token bucket' THEN '{rate,period,capacity,max_reserved,shards}'
        WHEN 'fixed window' THEN '{rate,period,capacity,max_reserved,shards,start}'
        WHEN 'sliding window' THEN '{rate,period,slices}'
        WHEN 'calendar window' THEN '{rate,resets,zone,first_weekday,first_day,first_month,max_reserved}'
        WHEN 'concurrency' THEN '{slots,lease}' END;
    IF v_fields IS NULL THEN
        RETURN c;
    END IF;
    PERFORM ratelimit.compile_word(p_says, 'mode', '{on,shadow,off}'), ratelimit.compile_word(p_says, 'on_change', '{carry,keep,scale,add,reset}');
    SELECT string_agg(k, ', ') INTO v_bad FROM jsonb_object_keys(p_says) AS k WHERE k <> ALL (v_fields || '{kind,mode,on_change,unit,description}');
    IF v_bad IS NOT NULL THEN
        PERFORM ratelimit.unreadable(p_says, format('%s is no field of a %s; it has %s', v_bad, c.kind, array_to_string(v_fields, ', ')));
    ELSIF NOT p_says ?& (v_fields[: v_needs]) THEN
        PERFORM ratelimit.unreadable(p_says, format('a %s needs %s', c.kind, array_to_string(v_fields[: v_needs], ' and ')));
    END IF;
    IF octet_length(p_says ->> 'unit') > 64 OR octet_length(p_says ->> 'description') > 2000 OR jsonb_typeof(p_says -> 'unit') IN ('array', 'object')
        OR jsonb_typeof(p_says -> 'description') IN ('array', 'object') THEN
        PERFORM ratelimit.unreadable(p_says, 'its unit can be a text of up to 64 bytes, and its description one of up to 2000');
    END IF;
    c.shards := 1; c.phase_us := -62135596800000000;
    IF c.kind = 'concurrency' THEN
        c.capacity := ratelimit.compile_number(p_says, 'slots', 1, 1000, true);
        c.lease_us := coalesce(ratelimit.compile_span(p_says, 'lease', 1000, 86400000000), 60000000);
        c.rate := c.capacity; c.steps := c.lease_us; c.step_us := 1;
        RETURN c;
    END IF;

    c.rate := ratelimit.compile_number(p_says, 'rate', 1e-9, 1e12);
    v_us := coalesce(ratelimit.compile_span(p_says, 'period', 1, 3155760000000000), 86400000000);
    v_most := least(1e12, c.rate * (3155760000000000000::float8 / (v_us * 1000)::float8)); -- what arrives in 100 years
    c.capacity := coalesce(ratelimit.compile_number(p_says, 'capacity', 0, 1e12), c.rate);
    c.max_owed := CASE WHEN c.kind = 'sliding window' OR p_says -> 'max_reserved' = '"forbidden"' THEN NULL
        ELSE coalesce(ratelimit.compile_number(p_says, 'max_reserved', 0, 1e12), CASE c.kind WHEN 'calendar window' THEN c.rate ELSE v_most END) END;
    IF c.kind = 'calendar window' THEN
        v_most := c.rate;
    END IF;
    IF c.capacity > v_most OR c.max_owed > v_most OR c.capacity > 0 AND c.capacity < 1e-9 OR c.max_owed > 0 AND c.max_owed < 1e-9 THEN
        PERFORM ratelimit.unreadable(p_says, format('its capacity and max_reserved can be 0, or from 1e-9 to %s', v_most));
    ELSIF c.capacity = 0 AND coalesce(c.max_owed, 0) = 0 THEN
        PERFORM ratelimit.unreadable(p_says, 'its capacity and max_reserved admit nothing; drop one of the two');
    END IF;
    c.shards := coalesce(nullif(ratelimit.compile_number(p_says, 'shards', 0, 64, true), 0), 1);
    IF c.shards NOT IN (1, 2, 4, 8, 16, 32, 64) THEN
        PERFORM ratelimit.unreadable(p_says, 'its shards are no power of two; write 1, 2, 4, 8, 16, 32 or 64');
    END IF;

    CASE c.kind
    WHEN 'token bucket' THEN
        c.step_us := 1; c.steps := v_us;
    WHEN 'fixed window' THEN
        c.step_us := v_us; c.steps := 1; c.phase_us := NULL;
        IF p_says ? 'start' THEN
            IF (p_says ->> 'start' ~ '^(?!9999-12-31T.*-)\d{4}-\d\d-\d\dT([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?(Z|[+-]\d\d:\d\d)$') IS NOT TRUE THEN
                PERFORM ratelimit.unreadable(p_says, format('its start is %s; write a time such as 2026-01-31T15:04:05Z', p_says -> 'start'));
            END IF;
            c.phase_us := ratelimit.phase_from((extract(epoch FROM regexp_replace(p_says ->> 'start', '(\.\d{6})\d+', '\1')::timestamptz) * 1000000)::bigint, v_us);
        END IF;
        IF v_us = 1 THEN
            c.kind := 'token bucket';
        END IF;
    WHEN 'sliding window' THEN
        c.slices := coalesce(nullif(ratelimit.compile_number(p_says, 'slices', 0, 128, true), 0), (SELECT max(n) FROM generate_series(1, 60) AS n WHERE v_us % n = 0));
        c.step_us := v_us / c.slices; c.steps := c.slices;
        IF v_us % c.slices <> 0 THEN
            PERFORM ratelimit.unreadable(p_says, format('its slices do not divide its period into whole microseconds; leave them out, or write a number that divides %s', v_us));
        END IF;
    ELSE
        v_months := ('{0,0,1,3,12}'::integer[])[ratelimit.compile_word(p_says, 'resets', '{day,week,month,quarter,year}')];
        IF p_says ? 'first_weekday' AND p_says ->> 'resets' <> 'week' OR p_says ? 'first_day' AND v_months = 0 OR p_says ? 'first_month' AND v_months < 3 THEN
            PERFORM ratelimit.unreadable(p_says, 'first_weekday is for weeks, first_day for months, quarters and years, and first_month for quarters and years');
        END IF;
        v_first := coalesce(nullif(ratelimit.compile_number(p_says, 'first_day', 0, 31, true), 0), 1);
        c.calendar := coalesce(p_says ->> 'zone', 'UTC'); -- compile_changed has checked it
        c.calendar := CASE WHEN v_months > 0 THEN format('0 %s %s %s %s', v_months, (coalesce(ratelimit.compile_word(p_says, 'first_month',
                '{january,february,march,april,may,june,july,august,september,october,november,december}'), 1) - 1) % v_months + 1, v_first, c.calendar)
            WHEN p_says ->> 'resets' = 'day' THEN '1 0 0 0 ' || c.calendar
            ELSE format('7 0 0 %s %s', (coalesce(ratelimit.compile_word(p_says, 'first_weekday',
                '{sunday,monday,tuesday,wednesday,thursday,friday,saturday}'), 1) + 2) % 7, c.calendar) END;
        c.step_us := 86400000000; c.steps := 1;
    END CASE;
    RETURN c;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.compile_policy FROM PUBLIC;

-- compile_rules compiles the rules of a limit. A statement is in effect until the next one about the same plan, unless a later one takes
-- effect no later than it. Where nothing is said about a plan, the rule for all plans is in effect, or else the smallest one of any plan.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.compile_rules(p_name text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM ratelimit.compiled_rules AS c WHERE c.name = p_name;
    INSERT INTO ratelimit.compiled_rules
    WITH stated AS MATERIALIZED (
        SELECT s.plan, s.says, greatest(s.from_us, -62135596799999999) AS at, s.version || ' ' || s.position AS id, n.capacity
        FROM (SELECT r.*, row_number() OVER newer AS newest, min(r.from_us) OVER (newer ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS newer_us
            FROM ratelimit.rules AS r WHERE r.of = 'rule' AND r.name = p_name AND r.key = '' AND (r.replaced_us > r.from_us) IS NOT FALSE
            WINDOW newer AS (PARTITION BY r.plan ORDER BY r.version DESC, r.position DESC)) AS s
        LEFT JOIN LATERAL ratelimit.compile_policy(s.says) AS n ON s.says IS NOT NULL
        WHERE s.newest <= 100 AND (s.newer_us > s.from_us) IS NOT FALSE
    ), held AS ( -- what is said about each plan at each time at which anything changes
        SELECT h.plan, h.at, first_value(h.says) OVER said AS says, first_value(h.stated) OVER said AS stated, first_value(h.capacity) OVER said AS capacity,
            first_value(h.id) OVER said AS id
        FROM (SELECT p.plan, i.at, s.says, s.at AS stated, s.capacity, s.id, count(s.at) OVER (PARTITION BY p.plan ORDER BY i.at) AS said
            FROM (SELECT plan FROM stated UNION SELECT '') AS p CROSS JOIN (SELECT at FROM stated UNION SELECT -62135596800000000) AS i
            LEFT JOIN stated AS s ON s.plan = p.plan AND s.at = i.at) AS h
        WINDOW said AS (PARTITION BY h.plan, h.said ORDER BY h.at)
    ), smallest AS (
        SELECT DISTINCT ON (h.at) h.at, h.says, h.plan, h.id FROM held AS h WHERE h.says IS NOT NULL ORDER BY h.at, h.plan <> '', h.capacity, h.plan
    ), standins AS ( -- without a rule, it's the next one in its mode, and after all rules the last one
        SELECT i.at, s.says, s.plan, s.id, m.mode, (s.id, m.mode) IS DISTINCT FROM (lag(s.id) OVER (ORDER BY i.at), lag(m.mode) OVER (ORDER BY i.at)) AS begins
        FROM (SELECT DISTINCT at FROM held) AS i CROSS JOIN LATERAL (
            SELECT s.* FROM smallest AS s ORDER BY s.at < i.at, CASE WHEN s.at >= i.at THEN s.at END, s.at DESC LIMIT 1) AS s,
            LATERAL (SELECT CASE WHEN s.at > i.at THEN coalesce(s.says ->> 'mode', 'on') ELSE 'on' END AS mode) AS m
    ), eras AS (
        SELECT h.plan, h.at, coalesce(h.says, b.says, s.says) AS says, CASE WHEN h.stated = h.at THEN h.says ->> 'on_change' WHEN b.stated = h.at THEN b.says ->> 'on_change' END AS change,
            CASE WHEN h.says IS NOT NULL THEN h.plan WHEN b.says IS NOT NULL THEN '' ELSE s.plan END AS of,
            CASE WHEN h.says IS NULL AND b.says IS NULL THEN s.mode ELSE coalesce(coalesce(h.says, b.says) ->> 'mode', 'on') END AS mode
        FROM held AS h JOIN held AS b ON b.plan = '' AND b.at = h.at JOIN standins AS s ON s.at = h.at
        WHERE (h.at = -62135596800000000 OR h.stated = h.at OR h.says IS NULL AND (b.stated = h.at OR b.says IS NULL AND s.begins))
            AND h.at <= (SELECT max(l.at) FROM smallest AS l)
    )
    SELECT p_name, e.plan, CASE WHEN e.at > -62135596800000000 THEN e.at ELSE -9223372036854775808 END,
        coalesce(lead(e.at) OVER (PARTITION BY e.plan ORDER BY e.at), (SELECT min(h.at) FROM held AS h WHERE h.at > (SELECT max(l.at) FROM smallest AS l)), 9223372036854775807) - 1,
        CASE e.of WHEN '' THEN p_name ELSE p_name || ', plan ' || e.of END, e.mode, e.change,
        e.mode = 'on' AND n.capacity IS NOT NULL AND n.shards = 1 AND n.kind IN ('token bucket', 'fixed window', 'sliding window'),
        EXISTS (SELECT FROM ratelimit.compiled_keys AS k WHERE k.name = p_name),
        e.says, n.kind, n.capacity, n.rate, n.steps, n.step_us, n.phase_us, n.slices, n.max_owed, n.lease_us, n.shards, n.calendar
    FROM eras AS e CROSS JOIN LATERAL ratelimit.compile_policy(e.says) AS n;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.compile_rules FROM PUBLIC;

-- scale_policy returns a multiple of a policy, as Scale of the Go package does: all numbers of tokens by the same factor, the nearest that's possible.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.scale_policy(p_says jsonb, p_times float8) RETURNS jsonb
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_scaled jsonb := p_says;
    v_field  text;
    v_fields text[] := CASE p_says ->> 'kind' WHEN 'calendar window' THEN '{max_reserved,rate}' ELSE '{rate,capacity,max_reserved}' END;
    v_before float8 := coalesce(p_says ->> 'capacity', p_says ->> 'rate');
BEGIN
    IF p_says ->> 'kind' = 'concurrency' THEN
        RETURN jsonb_set(p_says, '{slots}', to_jsonb(least(greatest(floor((p_says ->> 'slots')::float8 * p_times), 1), 1000)));
    END IF;
    FOREACH v_field IN ARRAY v_fields LOOP
        IF jsonb_typeof(p_says -> v_field) = 'number' AND (p_says ->> v_field)::float8 > 0 THEN
            p_times := least(greatest(p_times, 1e-9 / (p_says ->> v_field)::float8), 1e12 / (p_says ->> v_field)::float8);
        END IF;
    END LOOP;
    FOREACH v_field IN ARRAY v_fields LOOP
        IF jsonb_typeof(p_says -> v_field) = 'number' AND (p_says ->> v_field)::float8 > 0 THEN
            v_scaled := jsonb_set(v_scaled, ARRAY[v_field], to_jsonb(least(greatest((p_says ->> v_field)::float8 * p_times, 1e-9), 1e12)));
        END IF;
    END LOOP;
    IF p_says ->> 'kind' IN ('sliding window', 'calendar window') THEN
        v_scaled := jsonb_set(v_scaled, '{rate}', to_jsonb(greatest((v_scaled ->> 'rate')::float8, least(v_before, 1))));
    ELSIF v_before > 0 AND coalesce(v_scaled ->> 'capacity', v_scaled ->> 'rate')::float8 < least(v_before, 1) THEN
        v_scaled := jsonb_set(v_scaled, '{capacity}', to_jsonb(least(v_before, 1)));
    ELSIF v_before = 0 AND jsonb_typeof(p_says -> 'max_reserved') = 'number' THEN
        v_scaled := jsonb_set(v_scaled, '{max_reserved}', to_jsonb(greatest((v_scaled ->> 'max_reserved')::float8, least((p_says ->> 'max_reserved')::float8, 1))));
    END IF;
    PERFORM ratelimit.compile_policy(v_scaled);
    RETURN v_scaled;
EXCEPTION WHEN invalid_parameter_value THEN -- rounding at the edge of what a policy can have
    RETURN p_says;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.scale_policy FROM PUBLIC;

-- compile_key compiles the overrides and the pauses of a key. An override is in effect until its end or the next statement. A pause replaces
-- the ones that it overlaps with, from its beginning on, and the removal of pauses replaces all that end later.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.compile_key(p_name text, p_key text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_now  bigint := (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;
    v_says jsonb;
BEGIN
    FOR v_says IN SELECT r.says FROM ratelimit.rules AS r WHERE r.of = 'override' AND r.name = p_name AND r.key = p_key AND r.says IS NOT NULL AND (r.end_us > v_now) IS NOT FALSE LOOP
        IF 1 <> (SELECT count(*) FROM jsonb_object_keys(v_says) AS k WHERE k IN ('multiplier', 'on_plan', 'policy'))
            OR EXISTS (SELECT FROM jsonb_object_keys(v_says) AS k WHERE k NOT IN ('multiplier', 'on_plan', 'policy', 'mode', 'on_change'))
            OR v_says ? 'mode' AND NOT v_says ? 'policy' OR jsonb_typeof(v_says -> 'policy') <> 'object' OR v_says -> 'policy' ?| '{mode,on_change,unit,description}'
            OR v_says ? 'on_plan' AND (v_says ->> 'on_plan' ~ '^[A-Za-z0-9_.:/-]{1,64}$') IS NOT TRUE THEN
            PERFORM ratelimit.unreadable(v_says, 'an override has one of multiplier, on_plan and policy, and beside it may have on_change and, with a policy, mode');
        END IF;
        PERFORM ratelimit.compile_number(v_says, 'multiplier', 1e-6, 1e6), ratelimit.compile_word(v_says, 'mode', '{on,shadow,off}'),
            ratelimit.compile_word(v_says, 'on_change', '{carry,keep,scale,add,reset}');
        IF v_says ? 'policy' THEN
            PERFORM ratelimit.compile_policy(v_says -> 'policy');
        END IF;
    END LOOP;
    DELETE FROM ratelimit.compiled_keys AS k WHERE k.name = p_name AND k.key = p_key;
    INSERT INTO ratelimit.compiled_keys
    WITH stated AS MATERIALIZED (
        SELECT s.says, s.at, least(s.until_us, lead(s.at) OVER (ORDER BY s.at)) AS until
        FROM (SELECT r.*, greatest(r.from_us, -62135596799999999) AS at, min(r.from_us) OVER (ORDER BY r.version DESC, r.position DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS newer_us
            FROM ratelimit.rules AS r WHERE r.of = 'override' AND r.name = p_name AND r.key = p_key AND r.plan = '') AS s
        WHERE (s.newer_us > s.from_us) IS NOT FALSE
    ), overrides AS (
        SELECT s.*, lead(s.at) OVER (ORDER BY s.at) AS next FROM stated AS s WHERE s.says IS NOT NULL AND (s.until >= v_now - 2592000000000) IS NOT FALSE
    ), spans AS (
        SELECT s.at, coalesce(s.until, 9223372036854775807) AS until, s.says FROM overrides AS s
        UNION ALL SELECT s.until, coalesce(s.next, 9223372036854775807), s.says - '{multiplier,on_plan,policy,mode}'::text[] FROM overrides AS s WHERE s.until < coalesce(s.next, 9223372036854775807)
        UNION ALL SELECT -9223372036854775808, min(s.at), '{}' FROM overrides AS s HAVING count(*) > 0
    ), pauses AS (
        SELECT p.from_us, least(coalesce(p.end_us, 253402300799999999), (SELECT min(n.from_us) FROM ratelimit.rules AS n WHERE n.of = 'pause' AND n.name = p_name AND n.key = p_key AND n.plan = ''
            AND (n.version, n.position) > (p.version, p.position) AND n.from_us < p.end_us AND (n.says IS NULL OR p.from_us < n.end_us))) AS until
        FROM ratelimit.rules AS p WHERE p.of = 'pause' AND p.name = p_name AND p.key = p_key AND p.plan = '' AND p.says IS NOT NULL AND p.end_us > v_now
    )
    SELECT p_name, p_key, n.spans, n.paused FROM (SELECT
        (SELECT jsonb_agg(jsonb_build_object('from_us', s.at, 'until_us', s.until, 'says', s.says) ORDER BY s.at) FROM spans AS s) AS spans,
        coalesce((SELECT range_agg(int8range(p.from_us, p.until)) FROM pauses AS p WHERE p.from_us < p.until), '{}') AS paused) AS n
    WHERE n.spans IS NOT NULL OR NOT isempty(n.paused);
    UPDATE ratelimit.compiled_rules AS c SET keyed = NOT c.keyed WHERE c.name = p_name AND c.keyed <> EXISTS (SELECT FROM ratelimit.compiled_keys AS k WHERE k.name = p_name);
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.compile_key FROM PUBLIC;

-- compile_changed compiles what rows of the table of rules are about, in the transaction that changes them. Only one transaction does so at a time.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.compile_changed() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    LOCK TABLE ratelimit.compiled_rules IN SHARE ROW EXCLUSIVE MODE;
    IF TG_OP = 'TRUNCATE' THEN
        DELETE FROM ratelimit.compiled_rules;
        DELETE FROM ratelimit.compiled_keys;
        RETURN NULL;
    END IF;
    IF TG_OP = 'INSERT' THEN -- rows written by hand replace others, too
        UPDATE ratelimit.rules AS r SET replaced_us = o.from_us
        FROM (SELECT e.version, e.position, min(n.from_us) AS from_us FROM changed AS n JOIN ratelimit.rules AS e USING (of, name, key, plan)
            WHERE (e.version, e.position) < (n.version, n.position) AND (n.of <> 'pause' OR n.says IS NULL OR e.from_us < n.until_us)
                AND (e.end_us > greatest(n.from_us, e.from_us)) IS NOT FALSE
            GROUP BY e.version, e.position) AS o
        WHERE (r.version, r.position) = (o.version, o.position);
    ELSIF TG_OP = 'DELETE' THEN -- what these have replaced goes on
        UPDATE ratelimit.rules AS r SET replaced_us = (SELECT min(n.from_us) FROM ratelimit.rules AS n
            WHERE (n.of, n.name, n.key, n.plan) = (r.of, r.name, r.key, r.plan) AND (n.version, n.position) > (r.version, r.position)
                AND (n.of <> 'pause' OR n.says IS NULL OR r.from_us < n.until_us) AND (r.until_us > greatest(n.from_us, r.from_us)) IS NOT FALSE)
        FROM changed AS d WHERE (d.of, d.name, d.key, d.plan) = (r.of, r.name, r.key, r.plan) AND (d.version, d.position) > (r.version, r.position)
            AND r.replaced_us = d.from_us AND r.says IS NOT NULL;
    END IF;
    -- AT TIME ZONE also reads abbreviations, other spellings and POSIX zones, which Go does not know or reads otherwise.
    PERFORM ratelimit.unreadable(p.says, format('the server knows no time zone %s; write UTC, or a name with a slash, such as Europe/Berlin', p.says -> 'zone'))
    FROM (SELECT coalesce(r.says -> 'policy', r.says) AS says FROM changed AS r WHERE TG_OP = 'INSERT' OR TG_OP = 'UPDATE' AND r.replaced_us IS NULL) AS p
    WHERE p.says ->> 'kind' = 'calendar window' AND p.says ->> 'zone' <> ALL (SELECT z.name FROM pg_timezone_names AS z WHERE z.name ~ '/|^UTC$');
    PERFORM ratelimit.compile_policy(r.says) FROM changed AS r WHERE r.of = 'rule' AND r.says IS NOT NULL AND TG_OP = 'INSERT'; -- for a short error
    PERFORM ratelimit.compile_rules(c.name) FROM (SELECT DISTINCT r.name FROM changed AS r WHERE r.of = 'rule') AS c;
    PERFORM ratelimit.compile_key(c.name, c.key) FROM (SELECT DISTINCT r.name, r.key FROM changed AS r WHERE r.of IN ('override', 'pause')) AS c;
    IF TG_OP = 'UPDATE' THEN -- what no longer has a row under this name or key
        PERFORM ratelimit.compile_rules(c.name) FROM (SELECT r.name FROM replaced AS r WHERE r.of = 'rule' EXCEPT SELECT r.name FROM changed AS r WHERE r.of = 'rule') AS c;
        PERFORM ratelimit.compile_key(c.name, c.key) FROM (SELECT r.name, r.key FROM replaced AS r WHERE r.of IN ('override', 'pause')
            EXCEPT SELECT r.name, r.key FROM changed AS r WHERE r.of IN ('override', 'pause')) AS c;
    END IF;
    RETURN NULL;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.compile_changed FROM PUBLIC;
CREATE TRIGGER compile_inserted AFTER INSERT ON ratelimit.rules REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION ratelimit.compile_changed();
CREATE TRIGGER compile_updated AFTER UPDATE ON ratelimit.rules REFERENCING OLD TABLE AS replaced NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION ratelimit.compile_changed();
CREATE TRIGGER compile_deleted AFTER DELETE ON ratelimit.rules REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION ratelimit.compile_changed();
CREATE TRIGGER compile_truncated AFTER TRUNCATE ON ratelimit.rules FOR EACH STATEMENT EXECUTE FUNCTION ratelimit.compile_changed();

-- +goose Down
DROP TRIGGER IF EXISTS compile_truncated ON ratelimit.rules;
DROP TRIGGER IF EXISTS compile_deleted ON ratelimit.rules;
DROP TRIGGER IF EXISTS compile_updated ON ratelimit.rules;
DROP TRIGGER IF EXISTS compile_inserted ON ratelimit.rules;
DROP FUNCTION IF EXISTS ratelimit.compile_changed, ratelimit.compile_key, ratelimit.scale_policy, ratelimit.compile_rules,
    ratelimit.compile_policy, ratelimit.phase_from, ratelimit.compile_span, ratelimit.compile_word, ratelimit.compile_number,
    ratelimit.unreadable;
DROP TABLE ratelimit.compiled_keys;
DROP TABLE ratelimit.compiled_rules;
