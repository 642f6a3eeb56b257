-- +goose Up
-- What a bucket holds besides two numbers, for the kinds of limits that need more. Both are null for the others, and cost
-- them nothing. value and ts keep their meaning: value is what was left at ts.
ALTER TABLE ratelimit.buckets
    -- Sliding window: the length of a slice of time in microseconds, value, and totals of what was ever taken: up to ts, up
    -- to the end of the slice before that of ts, of the one before that, and so on.
    ADD COLUMN taken  double precision[],
    -- Concurrency: the last fencing number, and then the number, the end and the slots of each lease. Ends are
    -- microseconds since 1970-01-01 UTC, as ts.
    ADD COLUMN leases bigint[];

-- +goose Down
ALTER TABLE ratelimit.buckets DROP COLUMN leases, DROP COLUMN taken;
