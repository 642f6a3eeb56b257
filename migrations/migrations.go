// Package migrations holds the tables of the rate limiter as goose migrations, and applies them.
//
// The files create tables, constraints and indexes and nothing else: what the limiter does is in the
// statements it sends, so that a new version of the program never waits for a new function in the
// database. A released file is never edited; a change is a new file.
//
// A program usually calls [Up] when it starts. Any number of processes may do so at once: one
// applies what is missing, the others wait for it. Who would rather run goose's own tool can, on the
// same files:
//
//	goose -dir migrations -table ratelimit.goose_db_version postgres "$DATABASE_URL" up
//
// once the schema is there (CREATE SCHEMA ratelimit), because goose wants to write its table first.
//
// [Up] and [Down] hold a session's advisory lock while they work. Give them a pool that is connected
// to Postgres itself, or to a pooler in session mode: a pooler in transaction mode hands the session
// to others between two statements.
//
// # Roles
//
// The tables belong to the role that makes them. The programs that use them need less, and what they lack an attacker lacks
// who gets into one: [Grants] returns the statements for a role of programs with limits, which changes no rule, one of
// people who change rules, whose history they cannot change, and one that only reads. With a role that migrates:
//
//	CREATE ROLE ratelimit_owner LOGIN;
//	CREATE ROLE app LOGIN;
//	CREATE ROLE support LOGIN;
//	CREATE ROLE status_page LOGIN;
//	CREATE SCHEMA ratelimit AUTHORIZATION ratelimit_owner;
//
// and, where migrations run, on a pool that is connected as ratelimit_owner:
//
//	err := migrations.Up(ctx, pool, cfg)
//	// ...
//	statements, err := migrations.Grants(cfg, migrations.Roles{Application: "app", Operator: "support", Reader: "status_page"})
//	// ...
//	_, err = pool.Exec(ctx, statements)
//
// Where the application owns the tables today, name the new owner as Roles.Owner, and run the statements as a superuser.
// A program may go on to call Up when it starts: when everything is applied it only reads.
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

// DefaultSchema is the schema that the files name, and the one used when Config names none.
const DefaultSchema = "ratelimit"

// versionTable stands in the configured schema, so that an application that has migrations of its
// own, applied by goose or not, never sees these among them.
const versionTable = "goose_db_version"

// lockID is the advisory lock held while migrating, which takeLock takes. It is not goose's default: an application that
// calls Up from inside a goose migration of its own holds that one already.
const (
	lockID   int64 = 0x7067_7261_7465 // "pgrate"
	takeLock       = "SELECT pg_catalog.pg_advisory_xact_lock($1)"
)

// FS holds the migration files, which name [DefaultSchema], for who applies them with another tool.
//
//go:embed *.sql
var FS embed.FS

// ErrInvalidSchema is returned by every function of this package when Config.Schema is not a name of
// lower-case letters, digits and underscores that starts with no digit and has at most 63 bytes.
var ErrInvalidSchema = errors.New("migrations: invalid schema name")

var errNilPool = errors.New("the pool is nil; pass what pgxpool.New returned")

// Config says where the tables are. Its zero value is the schema "ratelimit".
type Config struct {
	// Schema is the schema that holds the tables and the record of what was applied. It is created
	// when it is missing, which needs the CREATE privilege on the database; when it is there already,
	// the CREATE privilege on the schema is enough. The connection's search_path plays no part.
	Schema string
	// Partitions is over how many partitions, by a hash of the name and the key, the table of buckets is spread: 1 is one plain table,
	// and [MaxPartitions] the most. 0 is whatever it is, and one plain table where Up makes it. Up makes a new table so, and
	// returns [ErrPartitions] where there is one already that is not: [Partition] changes that.
	Partitions int
}

// Up applies every migration that is not applied yet, each in its own transaction, and does nothing
// when there is none. It is safe when several processes call it at once, at any default isolation
// level, and works on a pool of one connection.
//
// When a migration fails, those before it stay applied, and the next Up goes on from there.
func Up(ctx context.Context, pool *pgxpool.Pool, cfg Config) error {
	err := migrate(ctx, pool, cfg, func(provider *goose.Provider, current int64) error {
		schema, err := cfg.schema()
		if err != nil {
			return err
		}
		if err := checkMade(ctx, pool, schema, cfg.Partitions); err != nil {
			return err
		}
		sources := provider.ListSources()
		if current >= sources[len(sources)-1].Version {
			return nil
		}
		if current == 0 && cfg.Partitions > 1 {
			if err := enoughLocks(ctx, pool, cfg.Partitions); err != nil {
				return err
			}
		}
		// Up looks for the version table before it takes the lock, and several that find none would
		// all create it. Asking for the version first creates it under the lock.
		if _, err := provider.GetDBVersion(ctx); err != nil {
			return err
		}
		if _, err := provider.Up(ctx); err != nil {
			return err
		}
		return checkMade(ctx, pool, schema, cfg.Partitions) // another process may have made it
	})
	if err != nil {
		return fmt.Errorf("migrate up: %w", err)
	}
	return nil
}

// Down undoes every applied migration, the newest first. All limits and everything they remember are
// lost: every bucket is full again after the next Up. The schema and goose's record in it stay. Down
// does nothing when nothing is applied.
func Down(ctx context.Context, pool *pgxpool.Pool, cfg Config) error {
	err := migrate(ctx, pool, cfg, func(provider *goose.Provider, current int64) error {
		if current == 0 {
			return nil
		}
		_, err := provider.DownTo(ctx, 0)
		return err
	})
	if err != nil {
		return fmt.Errorf("migrate down: %w", err)
	}
	return nil
}

// Version returns the highest version that is applied, 0 when none is. It only reads: neither schema
// nor table is created.
func Version(ctx context.Context, pool *pgxpool.Pool, cfg Config) (int64, error) {
	if pool == nil {
		return 0, errNilPool
	}
	schema, err := cfg.schema()
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

// migrate calls apply with a provider for cfg's schema and the version that is applied now.
func migrate(ctx context.Context, pool *pgxpool.Pool, cfg Config, apply func(*goose.Provider, int64) error) error {
	if pool == nil {
		return errNilPool
	}
	schema, err := cfg.schema()
	if err != nil {
		return err
	}
	if err := checkPartitions(cfg.Partitions); err != nil {
		return err
	}
	current, err := readVersion(ctx, pool, schema)
	if err != nil {
		return fmt.Errorf("read the version of schema %q: %w", schema, err)
	}
	provider, err := newProvider(pool, schema, cfg.Partitions)
	if err != nil {
		return err
	}
	// This closes the database/sql view of the pool, not the pool.
	return errors.Join(apply(provider, current), provider.Close())
}

func newProvider(pool *pgxpool.Pool, schema string, partitions int) (*goose.Provider, error) {
	store, err := newStore(schema)
	if err != nil {
		return nil, err
	}
	// Ask once a second, for five minutes: a process that dies takes its session, and so its lock, with it.
	locker, err := lock.NewPostgresSessionLocker(lock.WithLockID(lockID), lock.WithLockTimeout(1, 300))
	if err != nil {
		return nil, fmt.Errorf("make the migration lock: %w", err)
	}
	provider, err := goose.NewProvider(goose.DialectCustom, stdlib.OpenDBFromPool(pool), schemaFS{FS, schema, partitions},
		goose.WithStore(store),
		goose.WithSessionLocker(&ownPath{SessionLocker: locker}),
		goose.WithDisableGlobalRegistry(true), // the application's Go migrations are not ours
	)
	if err != nil {
		return nil, fmt.Errorf("read the migrations: %w", err)
	}
	return provider, nil
}
