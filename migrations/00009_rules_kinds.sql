-- +goose Up
-- The kinds whose tokens do not arrive in steps of one length. Programs from before this migration load the tables as
-- always: of a rule or an override whose kind they do not know they keep what it said before, and report it. rate and
-- period_us stay not null for them:
--
--     kind               rate            period_us
--     sliding window     the most in any Period of that length
--     calendar window    tokens in each window, and the longest that a window of that name is
--     concurrency        slots, and how long a lease on one is
--
-- What is new is null in all other kinds. Both statements look once at every row, and hold their lock for as long.
ALTER TABLE ratelimit.rules
    DROP CONSTRAINT rules_kind_check,
    ADD CONSTRAINT rules_kind_check CHECK (kind IN ('token bucket', 'fixed window', 'sliding window', 'calendar window', 'concurrency')),
    ADD COLUMN slices        integer  CHECK (slices BETWEEN 1 AND 128), -- sliding window: in how many parts it counts
    ADD COLUMN resets        text     CHECK (resets IN ('day', 'week', 'month', 'quarter', 'year')), -- calendar window
    ADD COLUMN zone          text     CHECK (
        octet_length(zone) <= 64 AND zone ~ '^[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+)*$' AND zone <> 'Local' AND zone !~* '^localtime$'
        AND (zone !~ '[0-9]' OR zone ~ '^(GMT[+-]?0|Etc/GMT([+-]?0|[+]([1-9]|1[0-2])|-([1-9]|1[0-4]))|EST5EDT|CST6CDT|MST7MDT|PST8PDT)$')), -- one of pg_timezone_names
    ADD COLUMN first_weekday smallint CHECK (first_weekday BETWEEN 0 AND 6), -- of weeks; 0 is Sunday
    ADD COLUMN first_day     smallint CHECK (first_day BETWEEN 1 AND 31), -- of months, quarters and years: their last if they are shorter
    ADD COLUMN first_month   smallint CHECK (first_month BETWEEN 1 AND 12), -- of quarters and years
    -- Adaptive: the price follows what an upstream accepts. null: it is not.
    ADD COLUMN floor         double precision CHECK (floor BETWEEN 0.001 AND 1),
    ADD COLUMN growth        double precision CHECK (growth BETWEEN 0.001 AND 1), -- a second
    ADD COLUMN epoch_us      bigint   CHECK (epoch_us BETWEEN 100000 AND 3600000000),
    ADD COLUMN apply         boolean, -- whether the price is charged, and not only told
    ADD CONSTRAINT rules_sliding CHECK (CASE kind WHEN 'sliding window'
        THEN num_nulls(slices) = 0 AND period_us % nullif(slices, 0) = 0 AND shards = 1 AND num_nonnulls(capacity, max_reserved) = 0
        ELSE slices IS NULL END),
    ADD CONSTRAINT rules_calendar CHECK (CASE kind WHEN 'calendar window'
        THEN num_nulls(resets, zone) = 0 AND shards = 1 AND capacity IS NULL AND coalesce(max_reserved, 0) <= rate
            AND (first_weekday IS NOT NULL) = (resets = 'week')
            AND (first_day IS NOT NULL) = (resets IN ('month', 'quarter', 'year'))
            AND (first_month IS NOT NULL) = (resets IN ('quarter', 'year'))
            AND period_us = 86400000000 * CASE resets WHEN 'day' THEN 1 WHEN 'week' THEN 7 WHEN 'month' THEN 31 WHEN 'quarter' THEN 92 ELSE 366 END
        ELSE num_nonnulls(resets, zone, first_weekday, first_day, first_month) = 0 END),
    ADD CONSTRAINT rules_concurrency CHECK (kind <> 'concurrency'
        OR rate BETWEEN 1 AND 1000 AND rate = trunc(rate) AND period_us BETWEEN 1000 AND 86400000000
            AND shards = 1 AND num_nonnulls(capacity, max_reserved) = 0),
    ADD CONSTRAINT rules_adaptive CHECK (
        num_nulls(floor, growth, epoch_us, apply) = 4
        OR num_nulls(floor, growth, epoch_us, apply) = 0 AND kind IN ('token bucket', 'fixed window', 'calendar window'));

ALTER TABLE ratelimit.overrides
    DROP CONSTRAINT overrides_kind_check,
    ADD CONSTRAINT overrides_kind_check CHECK (kind IN ('token bucket', 'fixed window', 'sliding window', 'calendar window', 'concurrency')),
    ADD COLUMN slices        integer  CHECK (slices BETWEEN 1 AND 128),
    ADD COLUMN resets        text     CHECK (resets IN ('day', 'week', 'month', 'quarter', 'year')),
    ADD COLUMN zone          text     CHECK (
        octet_length(zone) <= 64 AND zone ~ '^[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+)*$' AND zone <> 'Local' AND zone !~* '^localtime$'
        AND (zone !~ '[0-9]' OR zone ~ '^(GMT[+-]?0|Etc/GMT([+-]?0|[+]([1-9]|1[0-2])|-([1-9]|1[0-4]))|EST5EDT|CST6CDT|MST7MDT|PST8PDT)$')),
    ADD COLUMN first_weekday smallint CHECK (first_weekday BETWEEN 0 AND 6),
    ADD COLUMN first_day     smallint CHECK (first_day BETWEEN 1 AND 31),
    ADD COLUMN first_month   smallint CHECK (first_month BETWEEN 1 AND 12),
    ADD COLUMN floor         double precision CHECK (floor BETWEEN 0.001 AND 1),
    ADD COLUMN growth        double precision CHECK (growth BETWEEN 0.001 AND 1),
    ADD COLUMN epoch_us      bigint   CHECK (epoch_us BETWEEN 100000 AND 3600000000),
    ADD COLUMN apply         boolean,
    ADD CONSTRAINT overrides_sliding CHECK (CASE kind WHEN 'sliding window'
        THEN num_nulls(slices) = 0 AND period_us % nullif(slices, 0) = 0 AND shards = 1 AND num_nonnulls(capacity, max_reserved) = 0
        ELSE slices IS NULL END),
    ADD CONSTRAINT overrides_calendar CHECK (CASE kind WHEN 'calendar window'
        THEN num_nulls(resets, zone) = 0 AND shards = 1 AND capacity IS NULL AND coalesce(max_reserved, 0) <= rate
            AND (first_weekday IS NOT NULL) = (resets = 'week')
            AND (first_day IS NOT NULL) = (resets IN ('month', 'quarter', 'year'))
            AND (first_month IS NOT NULL) = (resets IN ('quarter', 'year'))
            AND period_us = 86400000000 * CASE resets WHEN 'day' THEN 1 WHEN 'week' THEN 7 WHEN 'month' THEN 31 WHEN 'quarter' THEN 92 ELSE 366 END
        ELSE num_nonnulls(resets, zone, first_weekday, first_day, first_month) = 0 END),
    ADD CONSTRAINT overrides_concurrency CHECK (kind <> 'concurrency'
        OR rate BETWEEN 1 AND 1000 AND rate = trunc(rate) AND period_us BETWEEN 1000 AND 86400000000
            AND shards = 1 AND num_nonnulls(capacity, max_reserved) = 0),
    ADD CONSTRAINT overrides_adaptive CHECK (
        num_nulls(floor, growth, epoch_us, apply) = 4
        OR num_nulls(floor, growth, epoch_us, apply) = 0 AND coalesce(kind IN ('token bucket', 'fixed window', 'calendar window'), false));

-- +goose Down
-- Programs from before cannot read the kinds: such rules and overrides go, and the less specific decides. What was
-- adaptive is its contract. The history keeps all of it.
DELETE FROM ratelimit.overrides WHERE kind IN ('sliding window', 'calendar window', 'concurrency');
DELETE FROM ratelimit.rules WHERE kind IN ('sliding window', 'calendar window', 'concurrency');
UPDATE ratelimit.rules_version SET version = version + 1;

ALTER TABLE ratelimit.overrides
    DROP CONSTRAINT overrides_adaptive, DROP CONSTRAINT overrides_concurrency, DROP CONSTRAINT overrides_calendar, DROP CONSTRAINT overrides_sliding,
    DROP COLUMN apply, DROP COLUMN epoch_us, DROP COLUMN growth, DROP COLUMN floor,
    DROP COLUMN first_month, DROP COLUMN first_day, DROP COLUMN first_weekday, DROP COLUMN zone, DROP COLUMN resets, DROP COLUMN slices,
    DROP CONSTRAINT overrides_kind_check,
    ADD CONSTRAINT overrides_kind_check CHECK (kind IN ('token bucket', 'fixed window'));

ALTER TABLE ratelimit.rules
    DROP CONSTRAINT rules_adaptive, DROP CONSTRAINT rules_concurrency, DROP CONSTRAINT rules_calendar, DROP CONSTRAINT rules_sliding,
    DROP COLUMN apply, DROP COLUMN epoch_us, DROP COLUMN growth, DROP COLUMN floor,
    DROP COLUMN first_month, DROP COLUMN first_day, DROP COLUMN first_weekday, DROP COLUMN zone, DROP COLUMN resets, DROP COLUMN slices,
    DROP CONSTRAINT rules_kind_check,
    ADD CONSTRAINT rules_kind_check CHECK (kind IN ('token bucket', 'fixed window'));
