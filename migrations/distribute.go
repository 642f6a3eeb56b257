package migrations

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// DefaultShards is the default of Distribution.Shards: an unusual number, and not Citus's default of 32.
const DefaultShards = 48

// isDistributed asks whether Citus distributes a table, if Citus is installed.
const isDistributed = `SELECT EXISTS (SELECT FROM pg_catalog.pg_dist_partition WHERE logicalrelid = $1::text::regclass)`

// maxShards is the maximum of Citus.
const maxShards = 64_000

var (
	// ErrNoCitus is returned by [Distribute] in a database without the extension citus, or with a version below 11.
	ErrNoCitus = errors.New("migrations: the database has no Citus that this works with")

	// ErrShards is returned by [Distribute] for an invalid number of shards, and for a number that tables of the
	// application have or would get.
	ErrShards = errors.New("migrations: the number of shards cannot be used")
)

// Distribution holds the settings of Distribute. The zero Distribution is ready for use.
type Distribution struct {
	// Shards is the number of shards of each table. Defaults to DefaultShards. It has no effect on tables that are
	// distributed already.
	//
	// It must differ from the numbers of shards of the application's tables with a text as distribution column, and from
	// citus.shard_count, the number of the next such table. Citus places tables with the same number and the same type of
	// key together. Then it refuses other tables whose keys have another collation: keys here have "C", and the
	// application's keys have the collation of the database.
	Shards int
}

// Distribute lets Citus distribute the tables that decisions use: buckets and leases by key, and reservations by id. It
// copies the fingerprint and the programs' functions to every server. All other tables stay on the coordinator, because
// no program's decision reads them; call the functions for people there. It leaves distributed tables as they are, so
// it can run any number of times, and in several processes at once. Each run gives the shards free pages, as Up does
// for other tables.
//
// Run it after [Up], on the coordinator. Existing rows are moved, and calls wait meanwhile. Then restart the programs,
// because a program checks only once whether the tables are distributed.
//
// It returns ErrNoCitus, ErrShards if your application's tables could no longer be distributed, and an error if the
// table of buckets is partitioned. Then nothing was changed.
func Distribute(ctx context.Context, pool *pgxpool.Pool, cfg Config, distribution Distribution) error {
	schema, err := cfg.schemaOn(ctx, pool)
	if err != nil {
		return err
	}
	shards := cmp.Or(distribution.Shards, DefaultShards)
	if shards < 1 || shards > maxShards {
		return fmt.Errorf("%w: %d; use 1 to %d", ErrShards, shards, maxShards)
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		d := distributing{tx: tx, schema: schema, shards: shards}
		return d.all(ctx)
	})
	if err == nil {
		options := pgx.TxOptions{IsoLevel: pgx.ReadCommitted}
		err = pgx.BeginTxFunc(ctx, pool, options, func(tx pgx.Tx) error { return makePages(ctx, tx, schema, shards) })
	}
	if err == nil {
		err = copyFunctions(ctx, pool, schema)
	}
	if err != nil {
		return fmt.Errorf("distribute: %w", err)
	}
	return nil
}

// versioned matches the names of the functions that programs call. Those for people read the compiled rules, which are
// on the coordinator.
var versioned = regexp.MustCompile(`_[0-9]+$`)

// copyFunctions copies the functions that decide to every server, where clients call them. Citus does so by itself only
// for functions that were created after the other servers were added. It gives PUBLIC its default privilege on the
// copies.
func copyFunctions(ctx context.Context, pool *pgxpool.Pool, schema string) error {
	functions, err := Functions(Config{Schema: schema})
	if err != nil {
		return err
	}
	for _, f := range functions {
		if !versioned.MatchString(f.Name) {
			continue
		}
		name := pgx.Identifier{schema, f.Name}.Sanitize()
		_, err := pool.Exec(ctx, `SELECT create_distributed_function($1::text::regproc::oid::regprocedure)`, name)
		if err == nil {
			_, err = pool.Exec(ctx, "REVOKE EXECUTE ON FUNCTION "+name+" FROM PUBLIC")
		}
		if err != nil {
			return fmt.Errorf("copy the function %s: %w", f.Name, err)
		}
	}
	return nil
}

// distributing is one run of Distribute.
type distributing struct {
	tx     pgx.Tx
	schema string
	shards int
}

// all distributes the tables that are not distributed yet.
func (d *distributing) all(ctx context.Context) error {
	if _, err := d.tx.Exec(ctx, takeLock, lockID); err != nil {
		return err
	}
	if err := notPartitioned(ctx, d.tx, d.schema); err != nil {
		return err
	}
	var usable bool
	const isThere = `SELECT EXISTS (SELECT FROM pg_catalog.pg_extension WHERE extname = 'citus' AND split_part(extversion, '.', 1)::integer >= 11)`
	if err := d.tx.QueryRow(ctx, isThere).Scan(&usable); err != nil {
		return err
	}
	if !usable {
		return fmt.Errorf("%w: create the extension citus, of version 11 or newer", ErrNoCitus)
	}
	for _, table := range []struct{ name, key, beside string }{
		{"buckets", "key", ""},
		{"leases", "key", "buckets"},
		{"reservations", "id", ""},
		{"fingerprint", "", ""},
	} {
		if err := d.one(ctx, table.name, table.key, table.beside); err != nil {
			return fmt.Errorf("%s: %w", table.name, err)
		}
	}
	return nil
}

// one distributes a table by key, if necessary beside the rows of another table with the same key, or copies a table
// without a key to every server. It does nothing if that was done before.
func (d *distributing) one(ctx context.Context, name, key, beside string) error {
	table := pgx.Identifier{d.schema, name}.Sanitize()
	var done bool
	err := d.tx.QueryRow(ctx, isDistributed, table).Scan(&done)
	switch {
	case err != nil || done:
		return err
	case key == "":
		_, err = d.tx.Exec(ctx, `SELECT create_reference_table($1::text)`, table)
		return err
	case beside != "":
		_, err = d.tx.Exec(ctx, `SELECT create_distributed_table($1::text, $2, colocate_with => $3)`,
			table, key, pgx.Identifier{d.schema, beside}.Sanitize())
		return err
	}
	if err := d.checkShards(ctx); err != nil {
		return err
	}
	_, err = d.tx.Exec(ctx,
		`SELECT create_distributed_table($1::text, $2, colocate_with => 'none', shard_count => $3::integer)`, table, key,
		d.shards)
	return err
}

// checkShards returns ErrShards if tables of the application have, or would get, the same number of shards and a text
// or a uuid as distribution column.
func (d *distributing) checkShards(ctx context.Context) error {
	const query = `
		SELECT current_setting('citus.shard_count')::integer = $1,
			EXISTS (SELECT FROM pg_catalog.pg_dist_partition AS p
				JOIN pg_catalog.pg_dist_colocation AS c ON c.colocationid = p.colocationid
				JOIN pg_catalog.pg_class AS t ON t.oid = p.logicalrelid
				WHERE c.shardcount = $1 AND c.distributioncolumntype IN ('text'::regtype, 'uuid'::regtype)
					AND t.relnamespace <> (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = $2))`
	var next, used bool
	if err := d.tx.QueryRow(ctx, query, d.shards, d.schema).Scan(&next, &used); err != nil {
		return err
	}
	if next || used {
		return fmt.Errorf("%w: tables of the application have %d shards, or would get so many; set Distribution.Shards to "+
			"another number", ErrShards, d.shards)
	}
	return nil
}
