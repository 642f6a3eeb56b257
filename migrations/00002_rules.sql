-- +goose Up
-- The policies of limits that are not in the code. These tables are read by programs as a whole and written by people:
-- no decision reads them. Every instant is in microseconds since 1970-01-01 UTC. Whoever writes here by hand adds 1 to
-- rules_version in the same transaction, and programs see it with their next poll.
--
-- The policy of a limit: of its keys on a plan, and with the plan '' of all others. A row says what was stated last, which
-- holds from from_us on; what held before is in rule_changes.
CREATE TABLE ratelimit.rules (
    name         text COLLATE "C" NOT NULL CHECK (name ~ '^[A-Za-z0-9_.:/-]{1,64}$'),
    plan         text COLLATE "C" NOT NULL DEFAULT '' CHECK (plan ~ '^[A-Za-z0-9_.:/-]{0,64}$'),
    kind         text             NOT NULL DEFAULT 'token bucket' CHECK (kind IN ('token bucket', 'fixed window', 'sliding window', 'calendar window', 'concurrency')),
    -- What rate and period_us are: of a sliding window, the most in any period of that length; of a calendar window, the tokens in
    -- each window and the longest length of one; of a concurrency, the slots and the length of a lease on them.
    -- NaN sorts above every number, so that BETWEEN refuses it.
    rate         double precision NOT NULL CHECK (rate BETWEEN 1e-9 AND 1e12),
    period_us    bigint           NOT NULL CHECK (period_us BETWEEN 1 AND 3155760000000000), -- 100 years
    capacity     double precision CHECK (capacity = 0 OR capacity BETWEEN 1e-9 AND 1e12), -- null: as much as rate
    max_reserved double precision CHECK (max_reserved = 0 OR max_reserved BETWEEN 1e-9 AND 1e12), -- null: no bound
    shards       integer          NOT NULL DEFAULT 1 CHECK (shards IN (1, 2, 4, 8, 16, 32, 64)),
    -- The start of some window; null: it follows from the name and the key.
    start_us     bigint           CHECK (start_us > -62135596800000000 AND start_us <= 253402300799999999),
    mode         text             NOT NULL DEFAULT 'on' CHECK (mode IN ('on', 'shadow', 'off')),
    on_change    text             NOT NULL DEFAULT 'keep' CHECK (on_change IN ('keep', 'scale', 'add', 'reset')),
    unit         text             NOT NULL DEFAULT '' CHECK (octet_length(unit) <= 64),
    description  text             NOT NULL DEFAULT '' CHECK (octet_length(description) <= 2000),
    version      bigint           NOT NULL DEFAULT 0, -- that of rules_version when it was stated
    from_us      bigint           NOT NULL DEFAULT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
                                  CHECK (from_us BETWEEN -62135596800000000 AND 253402300799999999),
    slices        integer  CHECK (slices BETWEEN 1 AND 128), -- sliding window: in how many parts it counts
    resets        text     CHECK (resets IN ('day', 'week', 'month', 'quarter', 'year')), -- calendar window
    zone          text     CHECK (
        octet_length(zone) <= 64 AND zone ~ '^[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+)*$' AND zone <> 'Local' AND zone !~* '^localtime$'
        AND (zone !~ '[0-9]' OR zone ~ '^(GMT[+-]?0|Etc/GMT([+-]?0|[+]([1-9]|1[0-2])|-([1-9]|1[0-4]))|EST5EDT|CST6CDT|MST7MDT|PST8PDT)$')), -- one of pg_timezone_names
    first_weekday smallint CHECK (first_weekday BETWEEN 0 AND 6), -- of weeks; 0 is Sunday
    first_day     smallint CHECK (first_day BETWEEN 1 AND 31), -- of months, quarters and years: their last if they are shorter
    first_month   smallint CHECK (first_month BETWEEN 1 AND 12), -- of quarters and years
    -- Adaptive: the price follows what an upstream accepts. null: it is not.
    floor         double precision CHECK (floor BETWEEN 0.001 AND 1),
    growth        double precision CHECK (growth BETWEEN 0.001 AND 1), -- a second
    epoch_us      bigint   CHECK (epoch_us BETWEEN 100000 AND 3600000000),
    apply         boolean, -- whether the price is charged, and not only told
    PRIMARY KEY (name, plan),
    -- What arrives in 100 years, in the arithmetic of the applications: by then a bucket has to be full, and what it owed has to be paid.
    CONSTRAINT rules_capacity_fills CHECK (capacity <= rate * (3155760000000000000::double precision / (period_us * 1000)::double precision)),
    CONSTRAINT rules_owed_is_paid CHECK (max_reserved <= rate * (3155760000000000000::double precision / (period_us * 1000)::double precision)),
    CONSTRAINT rules_admits_something CHECK (NOT (capacity = 0 AND max_reserved = 0)),
    CONSTRAINT rules_start_of_windows CHECK (start_us IS NULL OR kind = 'fixed window'),
    CONSTRAINT rules_sliding CHECK (CASE kind WHEN 'sliding window'
        THEN num_nulls(slices) = 0 AND period_us % nullif(slices, 0) = 0 AND shards = 1 AND num_nonnulls(capacity, max_reserved) = 0
        ELSE slices IS NULL END),
    CONSTRAINT rules_calendar CHECK (CASE kind WHEN 'calendar window'
        THEN num_nulls(resets, zone) = 0 AND shards = 1 AND capacity IS NULL AND coalesce(max_reserved, 0) <= rate
            AND (first_weekday IS NOT NULL) = (resets = 'week')
            AND (first_day IS NOT NULL) = (resets IN ('month', 'quarter', 'year'))
            AND (first_month IS NOT NULL) = (resets IN ('quarter', 'year'))
            AND period_us = 86400000000 * CASE resets WHEN 'day' THEN 1 WHEN 'week' THEN 7 WHEN 'month' THEN 31 WHEN 'quarter' THEN 92 ELSE 366 END
        ELSE num_nonnulls(resets, zone, first_weekday, first_day, first_month) = 0 END),
    CONSTRAINT rules_concurrency CHECK (kind <> 'concurrency'
        OR rate BETWEEN 1 AND 1000 AND rate = trunc(rate) AND period_us BETWEEN 1000 AND 86400000000
            AND shards = 1 AND num_nonnulls(capacity, max_reserved) = 0),
    CONSTRAINT rules_adaptive CHECK (
        num_nulls(floor, growth, epoch_us, apply) = 4
        OR num_nulls(floor, growth, epoch_us, apply) = 0 AND kind IN ('token bucket', 'fixed window', 'calendar window'))
);

-- The policy of a single key in place of the rule: a multiple of that, that of another plan, or one of its own (kind to
-- start_us, as in rules). A row holds from from_us until until_us; null: for ever. The spans of one key do not overlap.
CREATE TABLE ratelimit.overrides (
    name         text COLLATE "C" NOT NULL CHECK (name ~ '^[A-Za-z0-9_.:/-]{1,64}$'),
    key          text COLLATE "C" NOT NULL CHECK (octet_length(key) <= 256), -- as stored: an HMAC where keys are hashed
    multiplier   double precision CHECK (multiplier BETWEEN 1e-6 AND 1e6),
    plan         text COLLATE "C" CHECK (plan ~ '^[A-Za-z0-9_.:/-]{1,64}$'),
    kind         text             CHECK (kind IN ('token bucket', 'fixed window', 'sliding window', 'calendar window', 'concurrency')),
    rate         double precision CHECK (rate BETWEEN 1e-9 AND 1e12),
    period_us    bigint           CHECK (period_us BETWEEN 1 AND 3155760000000000),
    capacity     double precision CHECK (capacity = 0 OR capacity BETWEEN 1e-9 AND 1e12),
    max_reserved double precision CHECK (max_reserved = 0 OR max_reserved BETWEEN 1e-9 AND 1e12),
    shards       integer          CHECK (shards IN (1, 2, 4, 8, 16, 32, 64)),
    start_us     bigint           CHECK (start_us > -62135596800000000 AND start_us <= 253402300799999999),
    mode         text             CHECK (mode IN ('on', 'shadow', 'off')),
    on_change    text             NOT NULL DEFAULT 'keep' CHECK (on_change IN ('keep', 'scale', 'add', 'reset')),
    author       text             NOT NULL CHECK (author ~ '\S' AND octet_length(author) <= 256),
    reason       text             NOT NULL CHECK (reason ~ '\S' AND octet_length(reason) <= 2000),
    from_us      bigint           NOT NULL DEFAULT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
                                  CHECK (from_us BETWEEN -62135596800000000 AND 253402300799999999),
    until_us     bigint           CHECK (until_us > from_us AND until_us <= 253402300799999999),
    slices        integer  CHECK (slices BETWEEN 1 AND 128),
    resets        text     CHECK (resets IN ('day', 'week', 'month', 'quarter', 'year')),
    zone          text     CHECK (
        octet_length(zone) <= 64 AND zone ~ '^[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+)*$' AND zone <> 'Local' AND zone !~* '^localtime$'
        AND (zone !~ '[0-9]' OR zone ~ '^(GMT[+-]?0|Etc/GMT([+-]?0|[+]([1-9]|1[0-2])|-([1-9]|1[0-4]))|EST5EDT|CST6CDT|MST7MDT|PST8PDT)$')),
    first_weekday smallint CHECK (first_weekday BETWEEN 0 AND 6),
    first_day     smallint CHECK (first_day BETWEEN 1 AND 31),
    first_month   smallint CHECK (first_month BETWEEN 1 AND 12),
    floor         double precision CHECK (floor BETWEEN 0.001 AND 1),
    growth        double precision CHECK (growth BETWEEN 0.001 AND 1),
    epoch_us      bigint   CHECK (epoch_us BETWEEN 100000 AND 3600000000),
    apply         boolean,
    PRIMARY KEY (name, key, from_us),
    CONSTRAINT overrides_says_one_thing CHECK (num_nonnulls(multiplier, plan, kind) = 1),
    CONSTRAINT overrides_whole_policy CHECK (
        CASE WHEN kind IS NULL THEN num_nonnulls(rate, period_us, capacity, max_reserved, shards, start_us, mode) = 0
             ELSE num_nulls(rate, period_us, shards, mode) = 0 END),
    CONSTRAINT overrides_capacity_fills CHECK (capacity <= rate * (3155760000000000000::double precision / (period_us * 1000)::double precision)),
    CONSTRAINT overrides_owed_is_paid CHECK (max_reserved <= rate * (3155760000000000000::double precision / (period_us * 1000)::double precision)),
    CONSTRAINT overrides_admits_something CHECK (NOT (capacity = 0 AND max_reserved = 0)),
    CONSTRAINT overrides_start_of_windows CHECK (start_us IS NULL OR kind = 'fixed window'),
    CONSTRAINT overrides_sliding CHECK (CASE kind WHEN 'sliding window'
        THEN num_nulls(slices) = 0 AND period_us % nullif(slices, 0) = 0 AND shards = 1 AND num_nonnulls(capacity, max_reserved) = 0
        ELSE slices IS NULL END),
    CONSTRAINT overrides_calendar CHECK (CASE kind WHEN 'calendar window'
        THEN num_nulls(resets, zone) = 0 AND shards = 1 AND capacity IS NULL AND coalesce(max_reserved, 0) <= rate
            AND (first_weekday IS NOT NULL) = (resets = 'week')
            AND (first_day IS NOT NULL) = (resets IN ('month', 'quarter', 'year'))
            AND (first_month IS NOT NULL) = (resets IN ('quarter', 'year'))
            AND period_us = 86400000000 * CASE resets WHEN 'day' THEN 1 WHEN 'week' THEN 7 WHEN 'month' THEN 31 WHEN 'quarter' THEN 92 ELSE 366 END
        ELSE num_nonnulls(resets, zone, first_weekday, first_day, first_month) = 0 END),
    CONSTRAINT overrides_concurrency CHECK (kind <> 'concurrency'
        OR rate BETWEEN 1 AND 1000 AND rate = trunc(rate) AND period_us BETWEEN 1000 AND 86400000000
            AND shards = 1 AND num_nonnulls(capacity, max_reserved) = 0),
    CONSTRAINT overrides_adaptive CHECK (
        num_nulls(floor, growth, epoch_us, apply) = 4
        OR num_nulls(floor, growth, epoch_us, apply) = 0 AND coalesce(kind IN ('token bucket', 'fixed window', 'calendar window'), false))
);

-- What gives nothing until an instant: a key as stored, or with the key '' every bucket of the limit. The spans of one key do not
-- overlap.
CREATE TABLE ratelimit.pauses (
    name     text COLLATE "C" NOT NULL CHECK (name ~ '^[A-Za-z0-9_.:/-]{1,64}$'),
    key      text COLLATE "C" NOT NULL DEFAULT '' CHECK (octet_length(key) <= 256),
    author   text             NOT NULL CHECK (author ~ '\S' AND octet_length(author) <= 256),
    reason   text             NOT NULL CHECK (reason ~ '\S' AND octet_length(reason) <= 2000),
    from_us  bigint           NOT NULL DEFAULT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
                              CHECK (from_us BETWEEN -62135596800000000 AND 253402300799999999),
    until_us bigint           NOT NULL CHECK (until_us > from_us AND until_us <= 253402300799999999),
    PRIMARY KEY (name, key, from_us)
);

-- Which limits a request is asked of, in this order.
CREATE TABLE ratelimit.tiers (
    position     integer          PRIMARY KEY CHECK (position >= 0),
    name         text COLLATE "C" NOT NULL CHECK (name ~ '^[A-Za-z0-9_.:/-]{1,64}$'),
    key          text             NOT NULL DEFAULT '' CHECK (octet_length(key) <= 1024), -- a pattern; '': everybody's bucket
    route        text             NOT NULL DEFAULT '' CHECK (octet_length(route) <= 1024), -- '': any
    conditions   jsonb            NOT NULL DEFAULT '{}' CHECK (
        jsonb_typeof(conditions) = 'object' AND NOT jsonb_path_exists(conditions, 'strict $.* ? (@.type() != "string")')),
    cost_source  text             NOT NULL DEFAULT 'fixed' CHECK (
        cost_source = 'fixed' OR cost_source ~ '^(header|query):[!-~]+$' AND octet_length(cost_source) <= 256),
    fixed_cost   double precision NOT NULL DEFAULT 1 CHECK (fixed_cost BETWEEN 0 AND 1e12),
    default_cost double precision NOT NULL DEFAULT 1 CHECK (default_cost BETWEEN 0 AND 1e12) -- where the request names none
);

-- Every change of the tables above, in the order of (version, position). What an entry replaced is in the entry before it
-- for the same thing. Programs only add to it: grant them SELECT and INSERT.
CREATE TABLE ratelimit.rule_changes (
    version  bigint           NOT NULL,
    position integer          NOT NULL, -- among the changes that were made together
    what     text             NOT NULL CHECK (what IN ('rule', 'override', 'pause', 'tiers')),
    name     text COLLATE "C" NOT NULL DEFAULT '', -- '' of tiers
    plan     text COLLATE "C" NOT NULL DEFAULT '',
    key      text COLLATE "C" NOT NULL DEFAULT '',
    says     jsonb, -- what holds from from_us on; null: it is removed
    from_us  bigint           NOT NULL CHECK (from_us BETWEEN -62135596800000000 AND 253402300799999999),
    made_us  bigint           NOT NULL,
    author   text             NOT NULL CHECK (author ~ '\S' AND octet_length(author) <= 256),
    reason   text             NOT NULL CHECK (reason ~ '\S' AND octet_length(reason) <= 2000),
    PRIMARY KEY (version, position)
);

CREATE INDEX rule_changes_of_rules ON ratelimit.rule_changes (name, plan, version, position) WHERE what = 'rule';
CREATE INDEX rule_changes_of_limit ON ratelimit.rule_changes (name, what, plan, key, version);

-- One row, or none before the first change: what programs poll, and what one change after the other locks.
CREATE TABLE ratelimit.rules_version (
    id          boolean PRIMARY KEY DEFAULT true CHECK (id),
    version     bigint  NOT NULL CHECK (version >= 0),
    tiers_match text    NOT NULL DEFAULT 'all' CHECK (tiers_match IN ('all', 'first')) -- of the tiers that fit
);

-- +goose Down
DROP TABLE ratelimit.rules_version;
DROP TABLE ratelimit.rule_changes;
DROP TABLE ratelimit.tiers;
DROP TABLE ratelimit.pauses;
DROP TABLE ratelimit.overrides;
DROP TABLE ratelimit.rules;
