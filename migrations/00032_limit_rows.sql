-- +goose Up
-- limit_rows is a trigger that refuses rows over a limit (docs/sql.md). Its arguments are the limit, the column of the key and, if you like,
-- the column of the plan. AFTER INSERT FOR EACH STATEMENT, with the transition table new_rows, it decides once for each key, with the number
-- of its rows as the cost, in the order of the keys, so that no two statements deadlock. BEFORE INSERT FOR EACH ROW it decides on each row.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.limit_rows() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    r         record;
    v_row     text := CASE TG_LEVEL WHEN 'ROW' THEN '($1)' ELSE 'r' END;
    v_columns text := format('%s.%I::text AS k, %s AS p', v_row, coalesce(TG_ARGV[1], ''), CASE WHEN TG_NARGS = 3 THEN format('%s.%I::text', v_row, TG_ARGV[2]) ELSE 'NULL::text' END);
BEGIN
    IF TG_NARGS NOT IN (2, 3) OR TG_OP <> 'INSERT' OR TG_LEVEL = 'ROW' AND TG_WHEN <> 'BEFORE' OR TG_LEVEL = 'STATEMENT'
        AND NOT EXISTS (SELECT FROM pg_catalog.pg_trigger AS t WHERE t.tgrelid = TG_RELID AND t.tgname = TG_NAME AND t.tgnewtable = 'new_rows') THEN
        RAISE EXCEPTION 'ratelimit: limit_rows cannot be this trigger' USING ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'Pass the limit, the column of the key and, if you like, the column of the plan; AFTER INSERT REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT, or BEFORE INSERT FOR EACH ROW.';
    ELSIF TG_LEVEL = 'ROW' THEN
        EXECUTE 'SELECT ' || v_columns INTO r USING NEW;
        PERFORM ratelimit.require(TG_ARGV[0], r.k, 1, r.p);
        RETURN NEW;
    END IF;
    FOR r IN EXECUTE format('SELECT g.* FROM (SELECT %s, count(*) AS n FROM new_rows AS r GROUP BY 1, 2) AS g ORDER BY g.k COLLATE "C", g.p COLLATE "C"', v_columns) LOOP
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
