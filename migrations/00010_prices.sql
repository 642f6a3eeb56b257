-- +goose Up
-- What the adaptive limits know of their upstreams: a row for each limit and key, of all processes. A process adds what was
-- reported to it every fraction of an epoch, and one of them ends the epoch and says what share of the contract is given
-- from then on. A request costs 1 / share of what it asks. Without a row the contract holds: deleting one goes back to it,
-- and ends a pause. Instants are microseconds since 1970-01-01 UTC; to read one: to_timestamp(begun_us / 1e6).
CREATE TABLE ratelimit.prices (
    name            text COLLATE "C" NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 64),
    key             text COLLATE "C" NOT NULL CHECK (octet_length(key) <= 256), -- as stored: an HMAC where keys are hashed
    epoch           bigint           NOT NULL, -- how many have ended
    begun_us        bigint           NOT NULL, -- the present epoch
    seen_us         bigint           NOT NULL, -- the latest report
    -- What was reported in the present epoch: how many outcomes, and the tokens of the requests that the upstream accepted
    -- and throttled.
    outcomes        bigint           NOT NULL,
    accepted        double precision NOT NULL CHECK (accepted >= 0 AND accepted < 'Infinity'),
    throttled       double precision NOT NULL CHECK (throttled >= 0 AND throttled < 'Infinity'),
    share           double precision NOT NULL CHECK (share > 0 AND share <= 1), -- of the contract
    cut             boolean          NOT NULL, -- whether the epoch before ended in a cut
    paused_until_us bigint           NOT NULL, -- as the upstream's Retry-After asked; 0: it has not
    PRIMARY KEY (name, key)
) WITH (
    -- As that of buckets: an update touches no index.
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
);

-- At which price each bucket was reserved from, so that its actual cost is settled at that; empty: each at 1.
ALTER TABLE ratelimit.reservations ADD COLUMN prices double precision[] NOT NULL DEFAULT '{}';

-- +goose Down
ALTER TABLE ratelimit.reservations DROP COLUMN prices;
DROP TABLE ratelimit.prices;
