-- Lock.
SELECT 2
