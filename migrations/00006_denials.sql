-- +goose Up
-- What limits refused in a minute of the database's clock. The keys that were refused most have rows of their own, as far
-- as programs tell keys apart; the row whose key is empty has the rest of its limit and route. So sums over rows are exact.
CREATE TABLE ratelimit.denials (
    minute  timestamptz      NOT NULL, -- its beginning
    name    text COLLATE "C" NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 64),
    route   text COLLATE "C" NOT NULL CHECK (octet_length(route) <= 200),
    key     text COLLATE "C" NOT NULL CHECK (octet_length(key) <= 256), -- as stored: an HMAC where keys are hashed
    shadow  boolean          NOT NULL, -- whether nobody was turned away, as the limit is only tried
    refused bigint           NOT NULL,
    cost    double precision NOT NULL CHECK (cost > '-Infinity' AND cost < 'Infinity'),
    last_us bigint           NOT NULL, -- the latest of them; microseconds since 1970-01-01 UTC
    PRIMARY KEY (minute, name, route, key, shadow)
);

-- +goose Down
DROP TABLE ratelimit.denials;
