-- Write leases on buckets whose rows this transaction has locked.
--
-- $1 name[], $2 key[], $3 fence[]   the leases
-- $4 until_us[], $5 slots[]         their new columns
INSERT INTO ratelimit.leases (name, key, fence, until_us, slots)
SELECT * FROM unnest((SELECT $1::text[]), $2::text[], $3::bigint[], $4::bigint[], $5::bigint[])
ON CONFLICT (name, key, fence) DO UPDATE SET until_us = excluded.until_us, slots = excluded.slots
