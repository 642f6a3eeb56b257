-- +goose Up
-- When the windows of each limit begin, where the calendar says: its unit, weekday, day, month and zone; empty: of no limit.
ALTER TABLE ratelimit.reservations ADD COLUMN calendars text[] COLLATE "C" NOT NULL DEFAULT '{}';

-- +goose Down
ALTER TABLE ratelimit.reservations DROP COLUMN calendars;
