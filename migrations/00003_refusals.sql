-- +goose Up
-- Refusals and allowed requests by minute of the database's clock. If programs write keys, those with the most refusals have
-- rows of their own. The row with the empty key has the rest of its limit and route, so sums over rows are exact.
CREATE TABLE ratelimit.refusals (
    minute  timestamptz      NOT NULL, -- its beginning
    name    text COLLATE "C" NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 64),
    route   text COLLATE "C" NOT NULL CHECK (octet_length(route) <= 200),
    key     text COLLATE "C" NOT NULL CHECK (octet_length(key) <= 256), -- as stored: an HMAC where keys are hashed
    shadow  boolean          NOT NULL, -- whether the limit was in shadow, so that no request was turned away
    refused bigint           NOT NULL,
    cost    double precision NOT NULL CHECK (cost > '-Infinity' AND cost < 'Infinity'),
    last_us bigint           NOT NULL, -- the latest refusal, or request of a key; 0 without one; microseconds since 1970-01-01 UTC
    allowed bigint           NOT NULL DEFAULT 0, -- requests that a limit allowed, without their route; of a key an estimate
    rule    text COLLATE "C" NOT NULL DEFAULT '' CHECK (octet_length(rule) <= 400), -- of the last refusal that tells the plan of the key: "name, plan pro"
    PRIMARY KEY (minute, name, route, key, shadow)
);

-- +goose Down
DROP TABLE ratelimit.refusals;
