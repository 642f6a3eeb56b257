-- +goose Up
CREATE SCHEMA IF NOT EXISTS ratelimit;

-- One bucket is one row of two numbers: value tokens were held at the instant ts.
-- A bucket without a row is full. ts counts microseconds since 1970-01-01 UTC, so that every
-- difference is exact; to read it: to_timestamp(ts / 1e6).
CREATE TABLE ratelimit.buckets (
    name  text COLLATE "C" NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 64),
    key   text COLLATE "C" NOT NULL CHECK (octet_length(key) <= 256),
    shard integer          NOT NULL CHECK (shard >= 0),
    -- NaN sorts above Infinity, so the second comparison refuses both.
    value double precision NOT NULL CHECK (value > '-Infinity' AND value < 'Infinity'),
    -- Years 1 to 9999, what the applications' time types can hold.
    ts    bigint           NOT NULL CHECK (ts BETWEEN -62135596800000000 AND 253402300799999999),
    PRIMARY KEY (name, key, shard)
) WITH (
    -- Room on every page for the next version of a row, so that an update touches no index (HOT),
    -- and a vacuum that follows the number of updates, not the size of the table.
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
);

-- +goose Down
-- The schema stays: it may hold what others put there, and goose's own version table.
DROP TABLE ratelimit.buckets;
