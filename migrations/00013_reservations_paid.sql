-- +goose Up
-- When each bucket owed nothing for the reservation any more; empty: at ready_us, as before there was this column.
ALTER TABLE ratelimit.reservations ADD COLUMN paid_us bigint[] NOT NULL DEFAULT '{}';

-- +goose Down
ALTER TABLE ratelimit.reservations DROP COLUMN paid_us;
