-- +goose Up
-- On which plan each key was when it was reserved; empty: on none.
ALTER TABLE ratelimit.reservations ADD COLUMN plans text[] COLLATE "C" NOT NULL DEFAULT '{}';

-- +goose Down
ALTER TABLE ratelimit.reservations DROP COLUMN plans;
