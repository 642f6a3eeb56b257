-- +goose Up
-- expire_1 finds open reservations past their end, the oldest first, and ends those that give nothing back.
--
-- p_most                      how many at most
-- p_after_us, p_after_id      only those after this one, in the order of expires_us, id
-- p_locks                     whether it locks what it finds, and passes over what other transactions have locked; if not, it ends none.
--                             Citus locks no rows that it finds on several servers
-- p_as_of_us                  as of take_1
--
-- It returns the reservations with the ends that they had, and state says which of them it has ended.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.expire_1(p_most integer, p_after_us bigint, p_after_id uuid, p_locks boolean, p_as_of_us bigint)
RETURNS SETOF ratelimit.reservations
LANGUAGE plpgsql AS $$
DECLARE
    v_now bigint := coalesce(p_as_of_us, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    v_due ratelimit.reservations[];
BEGIN
    IF NOT p_locks THEN
        RETURN QUERY SELECT r.* FROM ratelimit.reservations AS r
        WHERE r.state = 'open' AND r.expires_us < v_now AND r.expires_us >= p_after_us AND (r.expires_us > p_after_us OR r.id > p_after_id)
        ORDER BY r.expires_us, r.id LIMIT p_most;
        RETURN;
    END IF;
    v_due := ARRAY(SELECT r FROM ratelimit.reservations AS r
        WHERE r.state = 'open' AND r.expires_us < v_now AND r.expires_us >= p_after_us AND (r.expires_us > p_after_us OR r.id > p_after_id)
        ORDER BY r.expires_us, r.id LIMIT p_most FOR UPDATE SKIP LOCKED);
    UPDATE ratelimit.reservations AS r SET state = 'expired', expires_us = v_now
    WHERE r.id = ANY (ARRAY(SELECT d.id FROM unnest(v_due) AS d WHERE NOT d.release));
    FOR i IN 1 .. cardinality(v_due) LOOP
        IF NOT v_due[i].release THEN
            v_due[i].state := 'expired';
        END IF;
        RETURN NEXT v_due[i];
    END LOOP;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.expire_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.expire_1;
