// Package migrations creates the rate limiter's tables and functions, as migrations of goose.
//
//	err := migrations.Up(ctx, pool, migrations.Config{})
//
// Any number of processes may call [Up] when they start: one applies the missing migrations, and the others wait for
// it. A released function never changes, because all programs must decide alike: a change is a new function with the
// next number. You can also run goose's own command on the files in [FS], after CREATE SCHEMA ratelimit, because goose
// creates its table of versions first:
//
//	goose -dir migrations -table ratelimit.goose_db_version postgres "$DATABASE_URL" up
//
// [Up] and [Down] hold their session's advisory lock, so connect to Postgres itself or to a pooler in session mode.
//
// The tables and functions belong to the role that creates them, and programs need fewer privileges. To let a role of
// its own migrate, and grant the others what they need:
//
//	CREATE ROLE ratelimit_owner LOGIN;
//	CREATE ROLE app LOGIN;
//	CREATE SCHEMA ratelimit AUTHORIZATION ratelimit_owner;
//
//	statements, err := migrations.Grants(cfg, migrations.Roles{Application: "app", Operator: "support", Reader: "page"})
//	// ...
//	_, err = pool.Exec(ctx, statements) // as ratelimit_owner
//
// If the application owns the tables today, name the new owner in Roles.Owner, and run the statements as a superuser.
package migrations

import (
	"context"
	"embed"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

// DefaultSchema is the schema in the files, and the default of Config.Schema.
const DefaultSchema = "ratelimit"

// versionTable is in the configured schema, apart from the application's own migrations.
const versionTable = "goose_db_version"

// lockID is the advisory lock of migrations, which takeLock takes. It differs from goose's default, because an
// application that calls Up in a goose migration of its own already holds that lock.
const (
	lockID   int64 = 0x7067_7261_7465 // "pgrate"
	takeLock       = "SELECT pg_catalog.pg_advisory_xact_lock($1)"
)

// FS holds the migration files for other tools. They use [DefaultSchema].
//
//go:embed *.sql
var FS embed.FS

// ErrInvalidSchema is returned by every function of this package for an invalid Config.Schema. A name has up to 63
// lower-case letters, digits and underscores, and does not begin with a digit.
var ErrInvalidSchema = errors.New("migrations: invalid schema name")

var errNilPool = errors.New("the pool is nil; pass what pgxpool.New returned")

// Config holds the place of the tables. The zero Config is ready for use.
type Config struct {
	// Schema is the schema of the tables, the functions and the applied versions. Defaults to "ratelimit". Up creates a
	// missing schema, which needs the CREATE privilege on the database. If it exists, the CREATE privilege on the schema
	// is enough. The search_path of the connection does not matter.
	Schema string
}

// Up applies all missing migrations, each in its own transaction. Several processes can call it at once, at any default
// isolation level. It works on a pool of one connection. If a migration fails, those before it stay applied, and the
// next Up continues. With all migrations applied, it restores what a restored dump can lack: functions, which need the
// statements of [Grants] again, and the tables' free pages (docs/operations.md#tables-that-became-small).
//
// If the table of buckets was partitioned, it returns an error, and changes nothing.
func Up(ctx context.Context, pool *pgxpool.Pool, cfg Config) error {
	err := migrate(ctx, pool, cfg, func(provider *goose.Provider, schema string, current int64) error {
		if err := notPartitioned(ctx, pool, schema); err != nil {
			return err
		}
		sources := provider.ListSources()
		if current >= sources[len(sources)-1].Version {
			return keep(ctx, pool, schema)
		}
		// Up looks for the version table before it takes the lock, and several that find none would
		// all create it. Asking for the version first creates it under the lock.
		if _, err := provider.GetDBVersion(ctx); err != nil {
			return err
		}
		if _, err := provider.Up(ctx); err != nil {
			return err
		}
		return keep(ctx, pool, schema)
	})
	if err != nil {
		return fmt.Errorf("migrate up: %w", err)
	}
	return nil
}

// Down undoes every applied migration, the newest first. All limits' state is lost, so every bucket is full after the
// next Up. The schema and goose's record in it stay. Down does nothing if no migration is applied. It returns an error,
// and removes nothing, if an object outside the schema depends on one in it, such as a trigger with limit_rows.
func Down(ctx context.Context, pool *pgxpool.Pool, cfg Config) error {
	err := migrate(ctx, pool, cfg, func(provider *goose.Provider, schema string, current int64) error {
		if current == 0 {
			return nil
		}
		if err := notUsed(ctx, pool, schema); err != nil {
			return err
		}
		_, err := provider.DownTo(ctx, 0)
		return err
	})
	if err != nil {
		return fmt.Errorf("migrate down: %w", err)
	}
	return nil
}

// Version returns the highest version that is applied, or 0. It only reads, so it creates neither schema nor table.
func Version(ctx context.Context, pool *pgxpool.Pool, cfg Config) (int64, error) {
	schema, err := cfg.schemaOn(ctx, pool)
	if err != nil {
		return 0, err
	}
	version, err := readVersion(ctx, pool, schema)
	if err != nil {
		return 0, fmt.Errorf("read the version of schema %q: %w", schema, err)
	}
	return version, nil
}

func readVersion(ctx context.Context, pool *pgxpool.Pool, schema string) (int64, error) {
	var exists bool
	if err := pool.QueryRow(ctx, tableExists, schema, versionTable).Scan(&exists); err != nil {
		return 0, err
	}
	if !exists {
		return 0, nil
	}
	var version int64
	table := pgx.Identifier{schema, versionTable}.Sanitize()
	err := pool.QueryRow(ctx, "SELECT coalesce(max(version_id), 0) FROM "+table).Scan(&version)
	return version, err
}

// hasRecord returns an error if the table of versions has no rows. Without a migration, goose leaves one, with 0.
func hasRecord(ctx context.Context, pool *pgxpool.Pool, schema string) error {
	var exists, filled bool
	if err := pool.QueryRow(ctx, tableExists, schema, versionTable).Scan(&exists); err != nil || !exists {
		return err
	}
	table := pgx.Identifier{schema, versionTable}.Sanitize()
	if err := pool.QueryRow(ctx, "SELECT EXISTS (SELECT FROM "+table+")").Scan(&filled); err != nil || filled {
		return err
	}
	return fmt.Errorf("the table %s has no rows, as in a dump without data, or row level security hides them; "+
		"if the schema holds nothing that you need, drop the schema, and create it with Up (ratelimit migrate up)", table)
}

// migrate calls apply with a provider for cfg's schema, the schema and the version that is applied now.
func migrate(ctx context.Context, pool *pgxpool.Pool, cfg Config,
	apply func(*goose.Provider, string, int64) error,
) error {
	schema, err := cfg.schemaOn(ctx, pool)
	if err != nil {
		return err
	}
	current, err := readVersion(ctx, pool, schema)
	if err != nil {
		return fmt.Errorf("read the version of schema %q: %w", schema, err)
	}
	if current == 0 {
		if err := hasRecord(ctx, pool, schema); err != nil {
			return err
		}
	}
	provider, err := newProvider(pool, schema)
	if err != nil {
		return err
	}
	// This closes the database/sql view of the pool, not the pool.
	return errors.Join(apply(provider, schema, current), provider.Close())
}

func newProvider(pool *pgxpool.Pool, schema string) (*goose.Provider, error) {
	store, err := newStore(schema)
	if err != nil {
		return nil, err
	}
	// Ask once a second, for five minutes: a process that dies takes its session, and so its lock, with it.
	locker, err := lock.NewPostgresSessionLocker(lock.WithLockID(lockID), lock.WithLockTimeout(1, 300))
	if err != nil {
		return nil, fmt.Errorf("make the migration lock: %w", err)
	}
	provider, err := goose.NewProvider(goose.DialectCustom, stdlib.OpenDBFromPool(pool), schemaFS{FS, schema},
		goose.WithStore(store),
		goose.WithSessionLocker(&ownPath{SessionLocker: locker}),
		goose.WithDisableGlobalRegistry(true), // the application's Go migrations are not ours
	)
	if err != nil {
		return nil, fmt.Errorf("read the migrations: %w", err)
	}
	return provider, nil
}
