-- +goose Up
-- Over how many rows each bucket was spread when it was reserved; empty: each is one row.
ALTER TABLE ratelimit.reservations ADD COLUMN shards integer[] NOT NULL DEFAULT '{}';

-- +goose Down
ALTER TABLE ratelimit.reservations DROP COLUMN shards;
