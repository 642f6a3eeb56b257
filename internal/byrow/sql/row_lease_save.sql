-- Write one lease on a bucket whose row this transaction has locked. It goes to one server, as row_read.sql.
--
-- $1 name, $2 key, $3 fence     the lease
-- $4 until_us, $5 slots         its new columns
INSERT INTO ratelimit.leases (name, key, fence, until_us, slots) VALUES ($1::text, $2::text, $3::bigint, $4::bigint, $5::bigint)
ON CONFLICT (name, key, fence) DO UPDATE SET until_us = excluded.until_us, slots = excluded.slots
