-- Find out whether Citus distributes the buckets. It is sent where its catalog is there.
--
-- $1 the table
--
-- Returns one row: whether it does.
SELECT EXISTS (SELECT FROM pg_catalog.pg_dist_partition AS p WHERE p.logicalrelid = pg_catalog.to_regclass($1::text))
