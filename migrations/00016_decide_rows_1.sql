-- +goose Up
-- decide_rows_1 decides on one row of several buckets, all or nothing, what the functions before leave undecided: the rows may be of any kind
-- of limit and of other policies, and there are more verbs than take. It's the general way, and so the slow one.
--
-- p_asks is an array of objects, in the order of the primary key, in which every call locks its rows:
--   name, key, shard, same   the row, and whether it's that of the ask before
--   verb                   take; look, of all asks, for a take of nothing from all of them, which changes nothing; charge, which takes also what isn't there; credit, which gives back; fill; renew and release, of a lease;
--                          lock, of all asks, which changes nothing
--   amount, lowest         tokens or slots, and the least that may remain after a take
--   within_us              a take is refused unless the bucket owes nothing any more by then; null: it may owe for longer
--   within_from_us, within_last_us   the first and the last instant at which within_us holds; null: it always does
--   fence                  the lease to renew or release
--   most, until_us         a credit fills the bucket up to its capacity, or to most if that's more, and gives nothing after the step that
--                          begins at until_us
--   capacity, rate, steps, step_us, phase_us, slices   as in take_1, and in slide_1 for a sliding window
--   lease_us               of a limit on concurrency: how long a lease is that is taken or renewed
--   since_us, last_us      the first and the last instant at which these numbers hold; null: they always do
--   from_us                when the policy began; null: it always held
--   seen_us                the ts of the row that the rest is about
--   passed                 how many steps begin after both seen_us and from_us, and up to since_us
--   change                 keep, carry, scale, add or reset: what becomes of the tokens of the policy before at from_us
--   was_capacity, was_rate, was_steps, was_step_us, was_phase_us, was_slices, was_passed   that policy, and how many of its steps begin
--                          after seen_us and up to from_us
--
-- It returns a row for each ask. allowed is null for all of them, and nothing was done, if the numbers don't hold at now_us, or if a row is
-- older than since_us, and its ts isn't seen_us. Then ts is as found, and null if there was none. Otherwise the columns are those after the
-- decision, or, if a take refuses, what there is under the policy of now. mended is whether the call has put right a row that a wrong clock
-- had written: its tokens count from now on, also if the call refuses.
--
-- A take of slots takes a lease on each bucket, all under one number, and leases is as acquire_1 says: of a lease that was taken or renewed
-- it has also number, end and slots, behind those of a lease with the number 0 for all others. A renewal extends all leases of the call or, if
-- one isn't held, none. A release gives back those that are held. allowed is whether the lease was held.
--
-- p_first                  null in a caller's transaction, which waits for all rows. Otherwise the call is in a transaction of the program's: it
--                          waits for the row of the p_first-th ask before it locks others, and then up to p_bound_ms for each of them,
--                          because it holds rows meanwhile. If that isn't enough, nothing was done, allowed is null, and held is true for the
--                          ask of that row. 0: it waits for none before others
-- p_alone, p_relaxed       as in take_1
--
-- Exact at every isolation level. A SERIALIZABLE transaction reads rows by upserts, so it takes SIREAD locks only to find leases that have ended or
-- are reset. A refusal leaves no row locked but those that it mended. A call that's alone is refused without a lock if it finds the same rows,
-- or the same leases, twice, so that all of them were there at one instant. One statement can't read them all, because on Citus each names one row. A rollback undoes
-- all.
-- +goose StatementBegin
CREATE FUNCTION ratelimit.decide_rows_1(p_asks jsonb, p_as_of_us bigint, p_first integer, p_bound_ms integer, p_alone boolean, p_relaxed boolean)
RETURNS TABLE (allowed boolean, value float8, ts bigint, capacity float8, taken float8[], leases bigint[], now_us bigint, mended boolean, held boolean)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    a         record;
    v_row     ratelimit.buckets;
    v_found   ratelimit.buckets[] := '{}';
    v_present ratelimit.buckets[] := '{}'; -- the rows under the policies of now
    v_after   ratelimit.buckets[] := '{}';
    v_made    boolean[] := '{}'; -- whether the row was missing, so it's full
    v_tids    tid[] := '{}';     -- of the rows that are made
    v_tid     tid;
    v_writes  boolean[] := '{}';
    v_mended  boolean[] := '{}';
    v_enough  boolean[] := '{}';
    v_now     bigint;
    v_begun   bigint;  -- when the step of now began
    v_quota   boolean; -- whether it's a quota for each window
    v_tokens  float8;
    v_totals  float8[];
    v_timeout text := current_setting('lock_timeout');
    v_bounded boolean := false;
    v_first   bigint; -- of the totals that a credit changes
    v_last    bigint;
    v_given   float8;
    v_refused boolean := false;
    v_slots   record;
    v_lease   bigint[] := '{}'; -- how long leases on the row are; null: there are none
    v_leases  text[] := '{}';   -- literals, because arrays in an array have one length
    v_until   bigint[] := '{}'; -- of a lease that is taken
    v_wanted  bigint[] := '{}'; -- its slots
    v_fence   bigint;           -- its number, the same on all rows
    v_reset   boolean;          -- whether the row is from before a reset
    v_ends    boolean[] := '{}'; -- whether that ends leases, once the row is written
    v_ahead   bigint;           -- by how much a wrong clock was
    v_upserts boolean := current_setting('transaction_isolation') = 'serializable'; -- where a SELECT takes SIREAD locks
    v_looked  boolean; -- whether the rows haven't changed since they were looked at
    n         integer := 0;
BEGIN
    IF p_relaxed THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    BEGIN
        FOR v_pass IN CASE WHEN p_alone AND p_asks -> 0 ->> 'verb' IN ('take', 'look') THEN 1 ELSE 2 END .. 2 LOOP -- the first one only looks
            FOR a IN
                SELECT * FROM ROWS FROM (jsonb_to_recordset(p_asks) AS (name text, key text, shard integer, same boolean, capacity float8, phase_us bigint))
                WITH ORDINALITY AS u (name, key, shard, same, capacity, phase_us, n)
                WHERE u.same IS NOT TRUE ORDER BY u.n IS DISTINCT FROM p_first, u.n
            LOOP
                n := a.n;
                IF v_pass = 1 THEN
                    SELECT b.* INTO v_row FROM ratelimit.buckets AS b WHERE b.name = a.name AND b.key = a.key AND b.shard = a.shard;
                    v_made[n] := NOT FOUND;
                    v_row.name := a.name; v_row.key := a.key; v_row.shard := a.shard;
                ELSE
                    IF n <> p_first AND NOT v_bounded THEN
                        PERFORM ratelimit.bound_waits_1(p_bound_ms::text);
                        v_bounded := true;
                    END IF;
                    v_made[n] := false;
                    IF NOT v_upserts THEN
                        SELECT b.* INTO v_row FROM ratelimit.buckets AS b WHERE b.name = a.name AND b.key = a.key AND b.shard = a.shard FOR NO KEY UPDATE;
                    END IF;
                    IF v_upserts OR NOT FOUND THEN
                        INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity, taken) -- only a row that is made has an empty array
                        VALUES (a.name, a.key, a.shard, a.capacity, a.phase_us, a.capacity, '{}')
                        ON CONFLICT (name, key, shard) DO UPDATE SET taken = nullif(b.taken, '{}')
                        RETURNING b.name, b.key, b.shard, b.value, b.ts, b.capacity, b.taken, b.leased, b.ctid
                        INTO v_row.name, v_row.key, v_row.shard, v_row.value, v_row.ts, v_row.capacity, v_row.taken, v_row.leased, v_tid;
                        v_made[n] := coalesce(v_row.taken = '{}', false);
                        v_tids[n] := v_tid;
                    END IF;
                END IF;
                v_found[n] := v_row;
            END LOOP;
            IF v_bounded THEN
                PERFORM ratelimit.bound_waits_1(v_timeout);
            END IF;
            v_now := coalesce(p_as_of_us, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint); -- behind the locks

            n := 0;
            v_fence := NULL;
            FOR a IN SELECT * FROM jsonb_to_recordset(p_asks) AS u (
                same boolean, verb text, amount float8, lowest float8, most float8, until_us bigint, within_us bigint, within_from_us bigint, within_last_us bigint, fence bigint,
                capacity float8, rate float8, steps float8, slices integer, step_us bigint, phase_us bigint, lease_us bigint, since_us bigint, last_us bigint,
                from_us bigint, seen_us bigint, passed bigint, change text,
                was_capacity float8, was_rate float8, was_steps float8, was_slices integer, was_step_us bigint, was_phase_us bigint, was_passed bigint)
            LOOP
                n := n + 1;
                IF a.same THEN
                    v_found[n] := v_after[n - 1];
                    v_made[n] := v_made[n - 1] AND NOT v_writes[n - 1];
                END IF;
                v_row := v_found[n];
                v_begun := greatest(a.phase_us + (v_now - a.phase_us) / a.step_us * a.step_us, a.since_us);
                v_quota := a.slices IS NULL AND a.step_us > 1;
                IF v_now NOT BETWEEN a.since_us AND a.last_us OR v_now NOT BETWEEN a.within_from_us AND a.within_last_us
                    OR NOT v_made[n] AND a.same IS NOT TRUE
                        AND (v_row.ts > a.last_us AND v_row.ts <= v_now + 60000000 OR v_row.ts < a.since_us AND a.seen_us IS DISTINCT FROM v_row.ts) THEN
                    RAISE SQLSTATE 'RL002';
                END IF;

                -- The row under the policy of now.
                v_reset := coalesce(v_row.ts < a.from_us AND a.change = 'reset', false);
                v_ends[n] := v_reset AND v_row.leased[1] > 0 OR a.same AND v_ends[n - 1] AND NOT v_writes[n - 1];
                IF a.same THEN -- it is
                ELSIF v_made[n] THEN
                    v_row.value := a.capacity; v_row.ts := v_begun; v_row.capacity := a.capacity; v_row.taken := NULL;
                ELSIF v_reset THEN
                    v_row.value := a.capacity; v_row.ts := a.from_us; v_row.capacity := a.capacity; v_row.leased := v_row.leased[: 1];
                    v_row.taken := CASE WHEN a.slices > 0 THEN ARRAY[a.step_us, a.capacity, 0, 0] END;
                ELSIF a.lease_us IS NOT NULL THEN -- held leases stay as they are
                    v_row.ts := greatest(v_row.ts, a.from_us);
                ELSIF v_row.ts < a.from_us AND a.slices IS NULL THEN
                    IF a.was_step_us > 1 AND v_row.capacity <> a.was_capacity THEN
                        SELECT c.value, c.capacity INTO v_row.value, v_row.capacity FROM ratelimit.carry_1(v_row.value, v_row.capacity, a.was_capacity) AS c;
                    END IF;
                    v_row.value := least(a.was_capacity, v_row.value + a.was_passed::float8 * a.was_rate / a.was_steps);
                    IF v_row.value >= a.was_capacity OR a.was_step_us > 1 AND a.was_passed > 0 THEN
                        v_row.capacity := a.was_capacity;
                    END IF;
                    v_row.ts := a.from_us;
                    v_row.taken := NULL;
                    IF a.change = 'carry' AND v_quota THEN -- as below
                    ELSE
                        v_row.value := CASE
                            WHEN v_row.value >= a.was_capacity THEN a.capacity
                            ELSE least(a.capacity, CASE
                                WHEN a.change = 'scale' AND a.was_capacity > 0 THEN v_row.value * (a.capacity / a.was_capacity)
                                WHEN a.change = 'carry' THEN greatest(least(v_row.value, 0), v_row.value + a.capacity - a.was_capacity)
                                WHEN a.change = 'add' THEN v_row.value + (a.capacity - a.was_capacity)
                                ELSE v_row.value END) END;
                        v_row.capacity := a.capacity;
                    END IF;
                ELSIF v_row.ts < a.from_us THEN
                    v_totals := CASE WHEN v_row.taken[2] = v_row.value THEN v_row.taken[3:] END;
                    SELECT t.totals, t.ts INTO v_totals, v_row.ts FROM ratelimit.totals_1(
                        coalesce(v_totals, ARRAY[least(greatest(0, v_row.capacity - v_row.value), 1e300), 0]),
                        CASE WHEN v_totals IS NOT NULL AND v_row.taken[1] BETWEEN 1 AND 3155760000000000 THEN v_row.taken[1]::bigint ELSE a.was_step_us END, v_row.ts,
                        a.was_capacity, a.was_slices, a.was_step_us, a.was_phase_us, a.from_us, NULL) AS t;
                    v_row.ts := greatest(v_row.ts, a.was_phase_us + (a.from_us - a.was_phase_us) / a.was_step_us * a.was_step_us);
                    SELECT t.totals INTO v_totals FROM ratelimit.totals_1(
                        v_totals[: a.was_slices + 2], a.was_step_us, v_row.ts, a.capacity, a.slices, a.step_us, a.phase_us, a.from_us,
                        CASE WHEN a.change = 'scale' AND a.was_capacity > 0 THEN a.capacity / a.was_capacity ELSE 1 END) AS t;
                    v_row.value := a.capacity - (v_totals[1] - v_totals[least(a.slices + 2, cardinality(v_totals))]);
                    v_row.ts := a.from_us; v_row.capacity := a.capacity; v_row.taken := ARRAY[a.step_us, v_row.value] || v_totals;
                END IF;
                IF v_quota AND v_row.capacity <> a.capacity AND a.same IS NOT TRUE THEN
                    SELECT c.value, c.capacity INTO v_row.value, v_row.capacity FROM ratelimit.carry_1(v_row.value, v_row.capacity, a.capacity) AS c;
                END IF;
                v_mended[n] := v_row.ts > v_now + 60000000;
                v_ahead := CASE WHEN v_mended[n] THEN v_row.ts - v_now END;
                IF v_mended[n] THEN
                    v_row.ts := v_begun;
                END IF;
                v_present[n] := v_row;

                -- The row after the verb.
                v_enough[n] := true;
                v_writes[n] := true;
                v_lease[n] := a.lease_us;
                v_leases[n] := NULL;
                v_until[n] := NULL;
                IF a.lease_us IS NOT NULL THEN
                    v_slots := ratelimit.slots_1(
                        v_row.name, v_row.key, v_row.value, v_row.ts, v_row.capacity, v_row.leased,
                        a.verb, a.amount, a.lowest, a.capacity, a.lease_us, a.fence, v_now, v_ahead, v_made[n] OR v_reset, v_pass = 2);
                    v_enough[n] := v_slots.enough; v_writes[n] := v_slots.writes; v_mended[n] := v_mended[n] AND v_slots.writes;
                    v_leases[n] := v_slots.leases; v_until[n] := v_slots.until_us; v_wanted[n] := v_slots.slots;
                    v_row.taken := NULL;
                    IF v_slots.free IS NOT NULL THEN
                        v_row.value := v_slots.free; v_row.capacity := a.capacity;
                    END IF;
                    IF v_mended[n] THEN
                        v_row.leased[2] := v_now; -- its leases are counted anew
                    END IF;
                    v_present[n] := v_row;
                    v_row.value := v_slots.value; v_row.ts := v_slots.ts; v_row.capacity := v_slots.capacity;
                    v_row.leased := v_slots.leased;
                    IF v_until[n] IS NOT NULL THEN
                        v_fence := greatest(v_fence, v_row.leased[1]);
                    END IF;
                ELSIF a.verb = 'lock' THEN
                    v_writes[n] := v_mended[n];
                ELSIF a.verb = 'fill' THEN
                    v_row.value := a.capacity; v_row.ts := v_begun; v_row.capacity := a.capacity;
                    v_row.taken := CASE WHEN a.slices > 0 THEN ARRAY[a.step_us, a.capacity, 0, 0] END;
                ELSIF a.slices IS NULL AND a.verb = 'credit' THEN
                    IF v_begun > a.until_us THEN
                        v_writes[n] := false; v_mended[n] := false;
                    ELSE
                        IF v_made[n] THEN -- it was full under all policies
                            v_row.value := greatest(a.capacity, a.most); v_row.ts := least(v_begun, -2208988800000000); v_row.capacity := v_row.value;
                        END IF;
                        v_row.value := least(greatest(a.capacity, a.most, v_row.value, CASE WHEN v_quota THEN v_row.capacity END), v_row.value + a.amount);
                        IF v_quota AND v_row.capacity <> a.capacity THEN
                            SELECT c.value, c.capacity INTO v_row.value, v_row.capacity FROM ratelimit.carry_1(v_row.value, v_row.capacity, a.capacity) AS c;
                        END IF;
                    END IF;
                ELSIF a.slices IS NULL THEN
                    v_tokens := least(a.capacity, v_row.value + (CASE WHEN v_row.ts < a.since_us THEN a.passed ELSE 0 END
                        + (greatest(v_begun - greatest(v_row.ts, a.since_us), 0) + a.step_us - 1) / a.step_us)::float8 * a.rate / a.steps);
                    IF v_tokens >= a.capacity OR v_quota AND v_begun > v_row.ts THEN
                        v_row.capacity := a.capacity;
                    END IF;
                    v_row.value := v_tokens - a.amount; v_row.ts := greatest(v_row.ts, v_begun); v_row.taken := NULL;
                    v_enough[n] := a.verb = 'charge' OR v_row.value >= a.lowest AND (v_row.value >= 0 OR a.within_us IS NULL OR v_row.value + (
                        (greatest(greatest(a.phase_us + (v_now + a.within_us - a.phase_us) / a.step_us * a.step_us, a.since_us) - v_row.ts, 0)
                            + a.step_us - 1) / a.step_us)::float8 * a.rate / a.steps >= 0);
                ELSE
                    v_totals := CASE WHEN v_row.taken[2] = v_row.value THEN v_row.taken[3:] END;
                    IF a.verb = 'credit' AND a.until_us < 253402300799999999 THEN
                        v_writes[n] := v_totals IS NULL OR a.until_us <= a.phase_us + (v_row.ts - a.phase_us) / a.step_us * a.step_us;
                        a.until_us := least(a.until_us, a.phase_us + (v_row.ts - a.phase_us) / a.step_us * a.step_us);
                    END IF;
                    SELECT t.totals, t.ts INTO v_totals, v_row.ts FROM ratelimit.totals_1(
                        coalesce(v_totals, ARRAY[least(greatest(0, v_row.capacity - v_row.value), 1e300), 0]),
                        CASE WHEN v_totals IS NOT NULL AND v_row.taken[1] BETWEEN 1 AND 3155760000000000 THEN v_row.taken[1]::bigint ELSE a.step_us END, v_row.ts,
                        a.capacity, a.slices, a.step_us, a.phase_us, v_now, NULL) AS t;
                    v_row.ts := greatest(v_row.ts, v_begun);
                    IF a.verb <> 'credit' THEN
                        v_totals[1] := v_totals[1] + a.amount;
                    ELSIF v_writes[n] THEN -- to the slice of until_us, or to the newest ones
                        v_totals := v_totals[: a.slices + 2];
                        v_first := 1;
                        v_last := cardinality(v_totals) - 1;
                        IF a.until_us < 253402300799999999 THEN
                            v_first := (a.phase_us + (v_row.ts - a.phase_us) / a.step_us * a.step_us - a.until_us) / a.step_us + 1;
                            v_last := least(v_last, v_first);
                        END IF;
                        v_tokens := a.amount;
                        FOR i IN least(v_first, v_last + 1)::integer .. v_last LOOP
                            EXIT WHEN NOT v_tokens > 0;
                            v_given := least(v_tokens, v_totals[i] - v_totals[i + 1]);
                            FOR j IN 1 .. i LOOP
                                v_totals[j] := greatest(v_totals[j] - v_given, v_totals[i + 1]);
                            END LOOP;
                            v_tokens := v_tokens - v_given;
                        END LOOP;
                        v_writes[n] := v_tokens <> a.amount;
                    END IF;
                    IF NOT v_writes[n] THEN
                        v_row := v_present[n];
                        v_writes[n] := v_mended[n];
                    ELSE
                        v_row.value := a.capacity - (v_totals[1] - v_totals[least(a.slices + 2, cardinality(v_totals))]);
                        v_row.capacity := a.capacity; v_row.taken := ARRAY[a.step_us, v_row.value] || v_totals;
                        v_enough[n] := a.verb NOT IN ('take', 'look') OR v_row.value >= a.lowest;
                    END IF;
                END IF;
                IF a.verb = 'look' THEN
                    v_row := v_present[n]; v_writes[n] := false; v_mended[n] := false;
                ELSIF a.verb = 'take' THEN
                    v_writes[n] := v_mended[n] OR v_row IS DISTINCT FROM v_present[n]
                        OR NOT v_made[n] AND v_row IS DISTINCT FROM v_found[n]; -- a take of nothing carries usage, too
                END IF;
                v_after[n] := v_row;
                v_refused := v_refused OR NOT v_enough[n] AND a.verb <> 'release';
            END LOOP;
            IF NOT true = ANY (v_writes) AND p_asks -> 0 ->> 'verb' <> 'lock' OR v_refused THEN
                v_looked := true;
                FOR i IN 1 .. CASE WHEN v_pass = 1 AND (n > 1 OR v_lease[1] IS NOT NULL) THEN n ELSE 0 END LOOP -- what was looked at must have been there at one instant
                    SELECT b.* INTO v_row FROM ratelimit.buckets AS b
                    WHERE b.name = v_found[i].name AND b.key = v_found[i].key AND b.shard = v_found[i].shard;
                    v_looked := v_looked AND FOUND <> v_made[i] AND (v_made[i] OR v_row IS NOT DISTINCT FROM v_found[i]);
                END LOOP;
                IF NOT v_looked THEN
                    v_refused := false;
                    CONTINUE;
                END IF;
                RAISE SQLSTATE 'RL001';
            END IF;
        END LOOP;
        FOR i IN 1 .. n LOOP
            IF v_writes[i] THEN
                v_row := v_after[i];
                IF v_ends[i] THEN
                    DELETE FROM ratelimit.leases AS l WHERE l.name = v_row.name AND l.key = v_row.key;
                END IF;
                IF v_until[i] IS NOT NULL THEN
                    v_row.leased[1] := v_fence;
                    INSERT INTO ratelimit.leases AS l (name, key, fence, until_us, slots) VALUES (v_row.name, v_row.key, v_fence, v_until[i], v_wanted[i])
                    ON CONFLICT (name, key, fence) DO UPDATE SET until_us = excluded.until_us, slots = excluded.slots; -- of a row that was deleted by hand
                    v_leases[i] := format('{%s,0,%s,%s,%s,%s,%s}', v_fence, v_row.leased[3], v_present[i].capacity - v_present[i].value, v_fence, v_until[i], v_wanted[i]);
                END IF;
                INSERT INTO ratelimit.buckets AS b (name, key, shard, value, ts, capacity, taken, leased)
                VALUES (v_row.name, v_row.key, v_row.shard, v_row.value, v_row.ts, v_row.capacity, v_row.taken, v_row.leased)
                ON CONFLICT (name, key, shard) DO UPDATE SET value = excluded.value, ts = excluded.ts, capacity = excluded.capacity, taken = excluded.taken,
                    leased = excluded.leased;
            ELSIF v_made[i] THEN -- for nothing; a scan for the key would take a SIREAD lock
                DELETE FROM ratelimit.buckets AS b
                WHERE b.ctid = v_tids[i] AND b.name = v_after[i].name AND b.key = v_after[i].key AND b.shard = v_after[i].shard;
            END IF;
        END LOOP;
    EXCEPTION -- the rows are as before, and unlocked
        WHEN SQLSTATE 'RL001' THEN
            v_after := v_present;
            v_writes := array_fill(false, ARRAY[n]);
            v_made := v_writes;
            v_until := '{}';
            FOR i IN 1 .. n LOOP -- no other call may have been quicker, and a row that is gone is full
                IF v_mended[i] THEN
                    UPDATE ratelimit.buckets AS b SET value = v_after[i].value, ts = v_after[i].ts, capacity = v_after[i].capacity, taken = v_after[i].taken,
                        leased = v_after[i].leased
                    WHERE b.name = v_after[i].name AND b.key = v_after[i].key AND b.shard = v_after[i].shard
                        AND b.ts = v_found[i].ts AND b.value = v_found[i].value;
                    v_mended[i] := FOUND;
                    IF FOUND AND v_lease[i] IS NOT NULL THEN
                        PERFORM ratelimit.slots_1(v_after[i].name, v_after[i].key, 0, v_now, 0, NULL,
                            'mend', 0, 0, v_after[i].capacity, v_lease[i], NULL, v_now, v_found[i].ts - v_now, false, true);
                    END IF;
                END IF;
            END LOOP;
        WHEN lock_not_available THEN
            IF n = p_first OR p_first IS NULL THEN
                RAISE;
            END IF;
            FOR i IN 1 .. jsonb_array_length(p_asks) LOOP
                now_us := (extract(epoch FROM clock_timestamp()) * 1000000)::bigint; mended := false; held := i = n;
                RETURN NEXT;
            END LOOP;
            RETURN;
        WHEN SQLSTATE 'RL002' THEN
            FOR i IN 1 .. jsonb_array_length(p_asks) LOOP
                value := v_found[i].value; ts := CASE WHEN NOT v_made[i] THEN v_found[i].ts END; capacity := v_found[i].capacity;
                now_us := v_now; mended := false;
                RETURN NEXT;
            END LOOP;
            RETURN;
    END;
    FOR i IN 1 .. n LOOP
        allowed := v_enough[i]; value := v_after[i].value; ts := v_after[i].ts; capacity := v_after[i].capacity; taken := v_after[i].taken;
        leases := v_leases[i]::bigint[]; now_us := v_now; mended := v_mended[i];
        RETURN NEXT;
    END LOOP;
END $$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION ratelimit.decide_rows_1 FROM PUBLIC;

-- +goose Down
DROP FUNCTION IF EXISTS ratelimit.decide_rows_1;
