-- +goose Up
-- A vacuum of buckets follows the number of rows: 1,000 dead ones and one in twenty. Updates need none, as the next one on a page
-- removes what is dead there; what needs it is the room of rows that were deleted. With 1,000 alone, many rows were read as a
-- whole each minute. Of rows nothing changes. Partitions are done one by one, and tables with a value of somebody's own are left.
-- +goose StatementBegin
DO $$
DECLARE leaf regclass;
BEGIN
    FOR leaf IN
        SELECT c.oid FROM pg_catalog.pg_class c
        WHERE (c.oid = 'ratelimit.buckets'::regclass OR c.oid IN (SELECT p.relid FROM pg_catalog.pg_partition_tree('ratelimit.buckets') p))
            AND c.reloptions @> '{autovacuum_vacuum_scale_factor=0}'
    LOOP
        EXECUTE format('ALTER TABLE %s SET (autovacuum_vacuum_scale_factor = 0.05)', leaf);
    END LOOP;
END $$;
-- +goose StatementEnd

-- +goose Down
-- +goose StatementBegin
DO $$
DECLARE leaf regclass;
BEGIN
    FOR leaf IN
        SELECT c.oid FROM pg_catalog.pg_class c
        WHERE (c.oid = 'ratelimit.buckets'::regclass OR c.oid IN (SELECT p.relid FROM pg_catalog.pg_partition_tree('ratelimit.buckets') p))
            AND c.reloptions @> '{autovacuum_vacuum_scale_factor=0.05}'
    LOOP
        EXECUTE format('ALTER TABLE %s SET (autovacuum_vacuum_scale_factor = 0)', leaf);
    END LOOP;
END $$;
-- +goose StatementEnd
