-- Take what was
-- asked for. It is for somebody.
--
-- $1 name
SELECT 1 -- what is no comment of its own
