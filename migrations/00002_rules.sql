-- +goose Up
-- The stored policies of limits, as statements: a policy, the instant from which it is in effect, its author and the reason. Rows
-- are added, and only replaced_us of a row changes. No decision reads the table: programs load it. All instants are in
-- microseconds since 1970-01-01 UTC. If you write rows by hand, add 1 to rules_version in the same transaction; programs load
-- them with their next poll.
--
-- From from_us on, a statement replaces earlier statements about the same thing: a rule (name and plan; the plan '' is all plans
-- without a rule), an override or a pause (name and key; in a pause, the key '' is every key), or the tiers.
CREATE TABLE ratelimit.rules (
    version  bigint           NOT NULL, -- of the change, as in rules_version
    position integer          NOT NULL DEFAULT 0, -- among the statements of a change
    of       text COLLATE "C" NOT NULL CHECK (of IN ('rule', 'override', 'pause', 'tiers')),
    name     text COLLATE "C" NOT NULL DEFAULT '' CHECK (name ~ '^[A-Za-z0-9_.:/-]{1,64}$' OR of = 'tiers' AND name = ''),
    plan     text COLLATE "C" NOT NULL DEFAULT '' CHECK (plan = '' OR of = 'rule' AND plan ~ '^[A-Za-z0-9_.:/-]{1,64}$'),
    key      text COLLATE "C" NOT NULL DEFAULT '' -- as stored: an HMAC where keys are hashed
                              CHECK (key = '' OR of IN ('override', 'pause') AND octet_length(key) <= 256),
    says     jsonb            CHECK (jsonb_typeof(says) = 'object'), -- as in a rules file, without the names; null: it is removed
    from_us  bigint           NOT NULL DEFAULT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
                              CHECK (from_us BETWEEN -62135596800000000 AND 253402300799999999), -- the years 1 to 9999
    until_us bigint           CHECK (until_us > from_us AND until_us <= 253402300799999999), -- its end; null: none
    -- When a later statement replaces it; up to from_us: it was never in effect. null: none does.
    replaced_us bigint,
    end_us   bigint           GENERATED ALWAYS AS (least(until_us, replaced_us)) STORED,
    made_us  bigint           NOT NULL DEFAULT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
    author   text             NOT NULL CHECK (author ~ '\S' AND octet_length(author) <= 256),
    reason   text             NOT NULL CHECK (reason ~ '\S' AND octet_length(reason) <= 2000),
    PRIMARY KEY (version, position),
    CONSTRAINT rules_pause_ends CHECK (of <> 'pause' OR says IS NULL OR until_us IS NOT NULL)
);

CREATE INDEX rules_of_thing ON ratelimit.rules (of, name, key, plan, version);
CREATE INDEX rules_by_end ON ratelimit.rules (end_us) WHERE of IN ('override', 'pause');

-- One row, or none before the first change. Programs poll it, and each change locks it.
CREATE TABLE ratelimit.rules_version (
    id      boolean PRIMARY KEY DEFAULT true CHECK (id),
    version bigint  NOT NULL CHECK (version >= 0)
);

-- +goose Down
DROP TABLE ratelimit.rules_version;
DROP TABLE ratelimit.rules;
