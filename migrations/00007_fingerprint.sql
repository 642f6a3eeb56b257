-- +goose Up
-- Under which secret (Config.HashKey) the keys of the other tables are stored: a fingerprint of it, or 'none' when
-- they are stored as they are. One row at most, which is inserted at the first call and never updated. Deleting it
-- lets the next secret in, under which every bucket is another, and full.
CREATE TABLE ratelimit.fingerprint (
    id       boolean PRIMARY KEY DEFAULT true CHECK (id),
    -- The HMAC-SHA-256 of a constant under the secret, base64url.
    hash_key text COLLATE "C" NOT NULL CHECK (hash_key = 'none' OR hash_key ~ '^[A-Za-z0-9_-]{43}$')
);

-- +goose Down
DROP TABLE ratelimit.fingerprint;
