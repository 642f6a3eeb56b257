-- Read under which secret the keys are stored: its fingerprint; by which way the question came, and whether Citus is there.
--
-- Returns hash_key, which is empty when none is stored yet, the process of the server, and the latter. In a SERIALIZABLE transaction the
-- read conflicts with nobody: the row is inserted at READ COMMITTED, and never updated.
SELECT coalesce((SELECT f.hash_key FROM ratelimit.fingerprint AS f), '') AS hash_key, pg_catalog.pg_backend_pid() AS backend,
    pg_catalog.to_regclass('pg_catalog.pg_dist_partition') IS NOT NULL AS has_citus
