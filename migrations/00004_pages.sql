-- +goose Up
-- Pages for the tables that calls look into by key. The planner reads a table of a few pages as a whole, which is cheaper than the
-- index, and a connection keeps that plan while thousands of new keys arrive. So no table is that small: these rows are deleted at
-- once, and their pages stay, because vacuum_truncate is off. The rows of a table fill 75 pages. No limit can have
-- their name.
--
-- TRUNCATE, VACUUM FULL, CLUSTER and a restored dump make a table small again. Up repeats these statements for a table that is too
-- small, and the command doctor says so.
INSERT INTO ratelimit.buckets (name, key, shard, value, ts, capacity, taken)
SELECT '(pages)', gen_random_uuid()::text, 0, 0, 0, 0, array_fill(0::float8, ARRAY[230])
FROM generate_series(1, 150);
DELETE FROM ratelimit.buckets WHERE name = '(pages)';

INSERT INTO ratelimit.reservations (id, ready_us, expires_us, cost, capacity, rate, steps, step_us, phase_us, lowest, paid_us, release, state, name, key)
SELECT gen_random_uuid(), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, false, 'expired', '(pages)', repeat('-', 1600)
FROM generate_series(1, 225);
DELETE FROM ratelimit.reservations WHERE name = '(pages)';

-- Their keys are compressed in the index and not in the table. Distribute has each shard get some.
INSERT INTO ratelimit.leases (name, key, fence, until_us, slots)
SELECT '(pages)', rpad(gen_random_uuid()::text, 1900), 0, 0, 0
FROM generate_series(1, 225) AS n;
DELETE FROM ratelimit.leases WHERE name = '(pages)';

-- +goose Down
-- Nothing to undo: the tables go with their own migrations.
