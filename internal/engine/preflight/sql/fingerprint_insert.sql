-- Store under which secret the keys are stored, unless that is there already.
--
-- $1 the fingerprint of the secret
INSERT INTO ratelimit.fingerprint (hash_key) VALUES ($1::text) ON CONFLICT DO NOTHING
