-- Read under which secret the keys are stored: its fingerprint; and whether Citus is there.
--
-- Returns hash_key, which is empty when none is stored yet, and the latter. In a SERIALIZABLE transaction the read conflicts with
-- nobody: the row is inserted at READ COMMITTED, and never updated.
SELECT coalesce(f.hash_key, '') AS hash_key, pg_catalog.to_regclass('pg_catalog.pg_dist_partition') IS NOT NULL AS has_citus
FROM (VALUES (true)) AS one (id) LEFT JOIN ratelimit.fingerprint AS f ON true
