-- +goose Up
CREATE SCHEMA IF NOT EXISTS ratelimit;

-- A bucket is one row: value tokens were in it at the instant ts. A bucket without a row is full. All columns that end in _us, and
-- ts, are microseconds since 1970-01-01 UTC, so that differences are exact. To read one: to_timestamp(ts / 1e6).
CREATE TABLE ratelimit.buckets (
    name   text COLLATE "C" NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 64),
    key    text COLLATE "C" NOT NULL CHECK (octet_length(key) <= 256), -- an HMAC if keys are hashed; so in all tables
    shard  integer          NOT NULL CHECK (shard >= 0),
    -- NaN sorts above Infinity, so the second comparison refuses both.
    value  double precision NOT NULL CHECK (value > '-Infinity' AND value < 'Infinity'),
    -- Years 1 to 9999, as in the time types of applications.
    ts     bigint           NOT NULL CHECK (ts BETWEEN -62135596800000000 AND 253402300799999999),
    -- What a full bucket had when value was written, so capacity - value was used.
    capacity double precision NOT NULL CHECK (capacity >= 0 AND capacity < 'Infinity'),
    -- Sliding window: the length of a slice in microseconds, value, and then totals of all tokens ever taken: up to ts, and up to
    -- the end of each earlier slice, newest first. Null for other kinds.
    taken  double precision[],
    -- Concurrency: the last fencing number, and if there are rows in leases, the instants before which and after which none of them ends. value
    -- is capacity less their slots. Null for other kinds. One array, because a table of more than eight columns has longer rows.
    leased bigint[],
    PRIMARY KEY (name, key, shard)
) WITH (
    -- Each page has room for the next version of a row, so an update touches no index (HOT). The next update on a page removes
    -- dead versions. Only deleted rows need a vacuum, so it follows the number of rows.
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off -- keeps the pages of 00004_pages.sql
);

-- A lease on slots of a bucket. Its row is deleted when it is released, or when slots are taken after it has ended. A row without slots is a
-- lease that a SERIALIZABLE transaction has released, because a DELETE would take a SIREAD lock on its way to the row.
CREATE TABLE ratelimit.leases (
    name     text COLLATE "C" NOT NULL,
    key      text COLLATE "C" NOT NULL,
    fence    bigint NOT NULL,
    until_us bigint NOT NULL, -- the instant from which it counts no more
    slots    bigint NOT NULL CHECK (slots >= 0),
    PRIMARY KEY (name, key, fence)
) WITH (
    -- A renewal touches no index (HOT). Most rows are deleted soon, so they are vacuumed as often as buckets are.
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off
);

CREATE INDEX leases_released ON ratelimit.leases (name) WHERE slots = 0;

-- A reservation that can still be settled, cancelled or started. Ended reservations stay for a while, for repeated calls. The row has
-- the policy under which it was made, because the process that ends it may not know that policy. name to settled are about its bucket,
-- or the first of them. The others are an array of objects with a field for each of these columns, without those that are 0 or null.
CREATE TABLE ratelimit.reservations (
    id         uuid    PRIMARY KEY,
    ready_us   bigint  NOT NULL, -- the work may run from here on
    expires_us bigint  NOT NULL, -- when an open reservation ends by itself
    stale_us   bigint,           -- work that has not started by then has lost its turn; null: never
    started_us bigint,           -- when the work started; null: not yet
    cost       double precision NOT NULL,
    capacity   double precision NOT NULL,
    rate       double precision NOT NULL,
    steps      double precision NOT NULL,
    step_us    bigint           NOT NULL,
    phase_us   bigint           NOT NULL,
    lowest     double precision NOT NULL,
    paid_us    bigint           NOT NULL,           -- from when on the bucket owed nothing any more
    owed       double precision NOT NULL DEFAULT 0, -- what it owed then, with the reservation
    settled    double precision,                    -- what the work cost in the end; null: it was not settled
    shard      integer NOT NULL DEFAULT 0,          -- of the row, as in buckets
    release    boolean NOT NULL, -- whether it gives back what it took when it ends by itself
    state      text    NOT NULL CHECK (state IN ('open', 'settled', 'cancelled', 'expired')),
    name       text    COLLATE "C" NOT NULL,
    key        text    COLLATE "C" NOT NULL,
    plan       text    COLLATE "C", -- of the key; null: none
    calendar   text    COLLATE "C", -- unit, weekday, day, month and zone of a calendar window; null: none
    others     jsonb                -- null: there is one bucket
) WITH (fillfactor = 70, vacuum_truncate = off);

CREATE INDEX reservations_expires ON ratelimit.reservations (expires_us);

-- Which secret (Config.HashKey) hashes the keys of the other tables: a fingerprint of it, or 'none' if keys are stored as they
-- are. The first call inserts the row; no call updates it. If you delete it, the next secret is accepted, and all buckets are new
-- and full under it.
CREATE TABLE ratelimit.fingerprint (
    id       boolean PRIMARY KEY DEFAULT true CHECK (id),
    -- The HMAC-SHA-256 of a constant under the secret, base64url.
    hash_key text COLLATE "C" NOT NULL CHECK (hash_key = 'none' OR hash_key ~ '^[A-Za-z0-9_-]{43}$')
);

-- What upstreams accept, for package adaptive: one row for each limit and key, for all processes. Several times an epoch, a process
-- adds its outcomes. One process ends the epoch and sets the share of the contract that is allowed from then on. Without a row the
-- whole contract is allowed, so deleting a row returns to it, and ends a pause.
CREATE TABLE ratelimit.upstreams (
    name            text COLLATE "C" NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 64),
    key             text COLLATE "C" NOT NULL CHECK (octet_length(key) <= 256),
    epoch           bigint           NOT NULL, -- how many epochs have ended
    begun_us        bigint           NOT NULL, -- the present epoch
    seen_us         bigint           NOT NULL, -- the latest report
    -- Reports of the present epoch: the number of outcomes, and the tokens of the requests that the upstream accepted and
    -- throttled.
    outcomes        bigint           NOT NULL,
    accepted        double precision NOT NULL CHECK (accepted >= 0 AND accepted < 'Infinity'),
    throttled       double precision NOT NULL CHECK (throttled >= 0 AND throttled < 'Infinity'),
    share           double precision NOT NULL CHECK (share > 0 AND share <= 1),
    cut             boolean          NOT NULL, -- whether the epoch before ended in a cut
    paused_until_us bigint           NOT NULL, -- by the upstream's Retry-After; 0: it sent none
    PRIMARY KEY (name, key)
) WITH (
    -- As for buckets: an update touches no index.
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
);

-- +goose Down
-- The schema stays: it may hold tables of others, and goose's version table.
DROP TABLE ratelimit.upstreams;
DROP TABLE ratelimit.fingerprint;
DROP TABLE ratelimit.reservations;
DROP TABLE ratelimit.leases;
DROP TABLE ratelimit.buckets;
