-- Read under which secret the keys are stored: its fingerprint; by which way the question came; and what decides by which statements calls go.
--
-- $1 the table of buckets
-- The word hidden after the dollar sign stands for the expression of pgerr.Hidden, for tables whose rows may be hidden.
--
-- Returns hash_key, which is empty when none is stored yet, the process of the server, whether Citus is there, whether the
-- buckets are in partitions, those tables, and extra_float_digits. In a SERIALIZABLE transaction the read conflicts
-- with no other transaction: the row is inserted at READ COMMITTED, and never updated.
SELECT coalesce((SELECT f.hash_key FROM ratelimit.fingerprint AS f), '') AS hash_key, pg_catalog.pg_backend_pid() AS backend,
    pg_catalog.to_regclass('pg_catalog.pg_dist_partition') IS NOT NULL AS has_citus,
    EXISTS (SELECT FROM pg_catalog.pg_class AS c WHERE c.oid = pg_catalog.to_regclass($1::text) AND c.relkind = 'p') AS partitioned,
    $hidden AS hidden,
    pg_catalog.current_setting('extra_float_digits')::integer AS digits
