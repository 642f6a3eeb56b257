-- Read under which secret the keys are stored: its fingerprint.
--
-- Returns hash_key, which is empty when none is stored yet, and the process of the server. In a SERIALIZABLE transaction the read conflicts
-- with nobody: the row is inserted at READ COMMITTED, and never updated.
SELECT coalesce((SELECT hash_key FROM ratelimit.fingerprint), ''), pg_catalog.pg_backend_pid()
