-- +goose Up
-- A reservation that may still be settled, cancelled or started, and for a while one that no longer can,
-- so that a repeated call finds out. It carries the terms it was made under, because the process that
-- ends it may not know them. Element n of every array is about the n-th bucket.
CREATE TABLE ratelimit.reservations (
    id         uuid    PRIMARY KEY,
    state      text    NOT NULL CHECK (state IN ('open', 'settled', 'cancelled', 'expired')),
    ready_us   bigint  NOT NULL, -- the work may run from here on; microseconds since 1970-01-01 UTC
    stale_us   bigint,           -- work not started by then has lost its slot; null: never
    started_us bigint,           -- when the work started; null: not yet
    expires_us bigint  NOT NULL, -- when an open reservation ends by itself
    release    boolean NOT NULL, -- whether it then gives back what it took
    names      text[]    COLLATE "C" NOT NULL,
    keys       text[]    COLLATE "C" NOT NULL,
    costs      double precision[] NOT NULL,
    capacities double precision[] NOT NULL,
    rates      double precision[] NOT NULL,
    steps      double precision[] NOT NULL,
    step_us    bigint[] NOT NULL,
    phase_us   bigint[] NOT NULL,
    lowest     double precision[] NOT NULL
) WITH (fillfactor = 70);

CREATE INDEX reservations_expires ON ratelimit.reservations (expires_us);

-- +goose Down
DROP TABLE ratelimit.reservations;
