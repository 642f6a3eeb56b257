package migrations

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// DefaultShards is how many shards Distribution makes when it names no number. It is none that Citus has by itself, which is 32,
// nor a usual one.
const DefaultShards = 48

// isDistributed asks whether Citus distributes a table, where Citus is there.
const isDistributed = `SELECT EXISTS (SELECT FROM pg_catalog.pg_dist_partition WHERE logicalrelid = $1::text::regclass)`

// maxShards is what Citus takes.
const maxShards = 64_000

var (
	// ErrNoCitus is returned by [Distribute] in a database without the extension citus, or with one of before version 11.
	ErrNoCitus = errors.New("migrations: the database has no Citus that this works with")

	// ErrShards is returned by [Distribute] for a number of shards that cannot be, and for one that tables of the application
	// have, or would get.
	ErrShards = errors.New("migrations: the number of shards cannot be used")
)

// Distribution says how Citus is to distribute the tables. Its zero value is DefaultShards shards.
type Distribution struct {
	// Shards is how many shards buckets and prices have, and reservations. Once they are distributed it changes nothing.
	//
	// It has to be a number that no table of the application's has that is distributed by a text, nor citus.shard_count, by which
	// the next one would be. Citus distributes tables of one type of key and one number of shards together, whatever it was
	// asked for, and then refuses to distribute a text of another collation: that of keys here is "C", and the application's is
	// the database's.
	Shards int
}

// Distribute has Citus distribute the tables that decisions are made on: buckets and prices by key, reservations by id; and
// puts the fingerprint on every server. The tables of rules and of refusals, and the record of migrations, stay on the coordinator,
// as no decision reads them. Tables that are distributed already are left as they are, so it does the same however often it
// runs, and several processes may run it at once.
//
// Buckets that are in partitions are distributed with them; [Partition] makes none where the table is distributed.
//
// Run it after [Up], on the coordinator, and restart the programs that used the tables before: a program finds out once whether
// they are distributed. Rows that are there are moved, and calls wait meanwhile.
//
// It returns ErrNoCitus, and ErrShards where tables of the application would come to harm; then nothing was changed.
func Distribute(ctx context.Context, pool *pgxpool.Pool, cfg Config, distribution Distribution) error {
	schema, err := cfg.schema()
	if err != nil {
		return err
	}
	if pool == nil {
		return errNilPool
	}
	shards := distribution.Shards
	if shards == 0 {
		shards = DefaultShards
	}
	if shards < 1 || shards > maxShards {
		return fmt.Errorf("%w: %d; use 1 to %d", ErrShards, shards, maxShards)
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		d := distributing{tx: tx, schema: schema, shards: shards}
		return d.all(ctx)
	})
	if err != nil {
		return fmt.Errorf("distribute: %w", err)
	}
	return nil
}

// distributing is one run of Distribute.
type distributing struct {
	tx     pgx.Tx
	schema string
	shards int
}

// all distributes those tables that are not distributed.
func (d *distributing) all(ctx context.Context) error {
	if _, err := d.tx.Exec(ctx, takeLock, lockID); err != nil {
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
	for _, table := range []struct{ name, key, with string }{
		{"buckets", "key", ""},
		{"prices", "key", "buckets"},
		{"reservations", "id", ""},
		{"fingerprint", "", ""},
	} {
		if err := d.one(ctx, table.name, table.key, table.with); err != nil {
			return fmt.Errorf("%s: %w", table.name, err)
		}
	}
	return nil
}

// one distributes a table by key, with the shards of another or of its own; without a key, to every server. It does so once.
func (d *distributing) one(ctx context.Context, name, key, with string) error {
	table := pgx.Identifier{d.schema, name}.Sanitize()
	var done bool
	err := d.tx.QueryRow(ctx, isDistributed, table).Scan(&done)
	switch {
	case err != nil || done:
		return err
	case key == "":
		_, err = d.tx.Exec(ctx, `SELECT create_reference_table($1::text)`, table)
		return err
	case with != "":
		_, err = d.tx.Exec(ctx, `SELECT create_distributed_table($1::text, $2, colocate_with => $3)`, table, key, pgx.Identifier{d.schema, with}.Sanitize())
		return err
	}
	if err := d.checkShards(ctx); err != nil {
		return err
	}
	_, err = d.tx.Exec(ctx, `SELECT create_distributed_table($1::text, $2, colocate_with => 'none', shard_count => $3::integer)`, table, key, d.shards)
	return err
}

// checkShards returns ErrShards when tables of the application would be, or are, distributed into so many shards by a text or a
// uuid.
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
		return fmt.Errorf("%w: tables of the application have %d shards, or would get so many; set Distribution.Shards to another number", ErrShards, d.shards)
	}
	return nil
}
