-- +goose Up
-- limit_rows is a trigger that refuses rows over a limit (docs/sql.md). Its arguments are the limit, the column of the key and, if you like,
-- the column of the plan. AFTER INSERT FOR EACH STATEMENT, with the transition table new_rows, it decides once for each key, with the number
-- of its rows as the cost, in the order of the keys, so that no two statements deadlock. BEFORE INSERT FOR EACH ROW it decides on each row.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.limit_rows() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    r record;
BEGIN
    IF TG_NARGS NOT IN (2, 3) OR TG_OP <> 'INSERT' OR TG_LEVEL = 'ROW' AND TG_WHEN <> 'BEFORE' THEN
        RAISE EXCEPTION 'ratelimit: limit_rows cannot be this trigger' USING ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'Pass the limit, the column of the key and, if you like, the column of the plan; AFTER INSERT REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT, or BEFORE INSERT FOR EACH ROW.';
    ELSIF TG_LEVEL = 'ROW' THEN
        PERFORM ratelimit.require(TG_ARGV[0], to_jsonb(NEW) ->> TG_ARGV[1], 1, to_jsonb(NEW) ->> TG_ARGV[2]);
        RETURN NEW;
    END IF;
    FOR r IN EXECUTE format('SELECT g.k, g.p, g.n FROM (SELECT %I::text AS k, %s AS p, count(*) AS n FROM new_rows GROUP BY 1, 2) AS g ORDER BY g.k COLLATE "C", g.p COLLATE "C"',
        TG_ARGV[1], CASE WHEN TG_NARGS = 3 THEN format('%I::text', TG_ARGV[2]) ELSE 'NULL::text' END)
    LOOP
        PERFORM ratelimit.require(TG_ARGV[0], r.k, r.n, r.p);
    END LOOP;
    RETURN NULL;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.limit_rows FROM PUBLIC;
COMMENT ON FUNCTION ratelimit.limit_rows IS 'Refuses rows over a limit: CREATE TRIGGER t AFTER INSERT ON messages REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION ratelimit.limit_rows(''messages'', ''author''). A third argument is the column of the plan.';

-- take_own takes from the bucket of the caller: of the role that is logged in, or, on a connection that has switched its role, as PostgREST
-- does, of the subject of the JWT. A client that may take can spend the tokens of any key; one that may only take_own has its own.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.take_own(name text, cost float8 DEFAULT 1) RETURNS ratelimit.decision
LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('role') IN ('none', session_user) THEN
        RETURN ratelimit.take($1, session_user::text, $2, NULL);
    END IF;
    RETURN ratelimit.take($1, nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'sub', $2, NULL);
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.take_own FROM PUBLIC;
COMMENT ON FUNCTION ratelimit.take_own IS 'Takes tokens from the bucket of the caller: of the role that is logged in, or in PostgREST of the subject of the JWT. For clients that run SQL of their own: grant them this function, and not take, which can spend the tokens of any key.';

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.take_own, ratelimit.limit_rows;
