package migrations

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// pagesFile makes the pages that keep the planner from reading a table as a whole. It can be applied any number of
// times.
const pagesFile = "00004_pages.sql"

// MinPages is the number of pages from which on the planner looks rows up by their key, whatever it counted at the last
// ANALYZE. The most expensive of those lookups, of ten rows by their place, costs as much as 40 pages.
const MinPages = 48

// keep makes what the newest migration made and the schema has lost, for example in a restored dump: functions, and the
// pages of a table with fewer than MinPages. It makes no pages if the role may not write the tables, or if the database
// has Citus, where the rows can be on other servers: see Distribute.
func keep(ctx context.Context, pool *pgxpool.Pool, schema string) error {
	return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SET LOCAL search_path = pg_catalog, pg_temp"); err != nil {
			return err
		}
		functions, small, err := lost(ctx, tx, schema)
		if err != nil || len(functions) == 0 && !small {
			return err
		}
		if _, err := tx.Exec(ctx, takeLock, lockID); err != nil {
			return err
		}
		// Another process may have made them meanwhile.
		functions, small, err = lost(ctx, tx, schema)
		if err != nil {
			return err
		}
		if err := makeFunctions(ctx, tx, functions); err != nil || !small {
			return err
		}
		return makePages(ctx, tx, schema, 1)
	})
}

// lost returns what keep makes.
func lost(ctx context.Context, tx pgx.Tx, schema string) (functions []Function, small bool, err error) {
	if functions, err = MissingFunctions(ctx, tx, Config{Schema: schema}); err != nil {
		return nil, false, err
	}
	small, err = lackPages(ctx, tx, schema)
	return functions, small, err
}

// lackPages reports whether one of the tables lacks pages that the role can make.
func lackPages(ctx context.Context, tx pgx.Tx, schema string) (lack bool, err error) {
	const query = `
		SELECT count(*) > 0 AND current_setting('transaction_read_only') = 'off' AND to_regclass('pg_catalog.pg_dist_partition') IS NULL
			AND bool_and(has_table_privilege(t.oid, 'SELECT') AND has_table_privilege(t.oid, 'INSERT') AND has_table_privilege(t.oid, 'DELETE'))
			AND bool_or(pg_relation_size(t.oid) < $2 * current_setting('block_size')::bigint)
		FROM pg_class t JOIN pg_namespace n ON n.oid = t.relnamespace
		WHERE n.nspname = $1 AND has_schema_privilege(n.oid, 'USAGE')
			AND t.relname IN ('buckets', 'leases', 'reservations') AND t.relkind = 'r'`
	err = tx.QueryRow(ctx, query, schema, MinPages).Scan(&lack)
	return lack, err
}

// makePages applies pagesFile for a number of shards: its rows have random keys, so each shard gets about as many.
func makePages(ctx context.Context, tx pgx.Tx, schema string, shards int) error {
	up, err := upOf(schemaFS{FS, schema}, pagesFile)
	if err != nil {
		return err
	}
	for range shards {
		if _, err := tx.Exec(ctx, up); err != nil {
			return fmt.Errorf("make the pages of the tables: %w", err)
		}
	}
	return nil
}
