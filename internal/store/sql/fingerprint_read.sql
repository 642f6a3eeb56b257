-- Read under which secret the keys are stored: its fingerprint.
--
-- Returns no row when none is stored yet, else hash_key. In a SERIALIZABLE transaction the read conflicts with nobody: the
-- row is inserted at READ COMMITTED, and never updated.
SELECT hash_key FROM ratelimit.fingerprint
