package scheduler

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/pgratelimit/pgratelimit/internal/arg"
)

// MigrateConfig configures Migrate.
type MigrateConfig struct {
	// Schema is the schema of River's tables, the same as river.Config.Schema. It is created if it is missing. Defaults
	// to River's default: the first schema of the search_path, usually public.
	Schema string
}

const (
	// migrateLock is the advisory lock held while migrating.
	migrateLock int64 = 0x7067_7261_7469_7672 // "pgrativr"
	// lockPause is the time between two attempts to get it. Waiting inside the database would hold a snapshot,
	// for which a migration that builds an index concurrently waits in turn.
	lockPause = 100 * time.Millisecond
)

// Migrate updates River's own tables, with rivermigrate, but not the limiter's: use migrations.Up. Any number of
// processes may call it at once: one migrates, and the others wait until ctx ends. It works on a pool of one
// connection, but opens one more for the lock.
func Migrate(ctx context.Context, pool *pgxpool.Pool, config MigrateConfig) (err error) {
	if pool == nil {
		return fmt.Errorf("%w: the pool is nil; pass what pgxpool.New returned", ErrInvalidConfig)
	}
	if err := arg.CheckContext(ctx, "migrate"); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalidConfig, err)
	}
	if config.Schema != "" {
		if err := arg.CheckSchema(config.Schema); err != nil {
			return fmt.Errorf("%w: %w", ErrInvalidConfig, err)
		}
	}
	conn, err := lock(ctx, pool)
	if err != nil {
		return fmt.Errorf("scheduler: migrate: lock: %w", err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }() // which gives up the lock
	if config.Schema != "" {
		if err := createSchema(ctx, conn, config.Schema); err != nil {
			return fmt.Errorf("scheduler: migrate: create schema %q: %w", config.Schema, err)
		}
	}
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{Schema: config.Schema})
	if err != nil {
		return fmt.Errorf("scheduler: migrate: %w", err)
	}
	if _, err := migrator.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
		return fmt.Errorf("scheduler: migrate: %w", err)
	}
	return nil
}

// lock returns a connection that holds the advisory lock.
func lock(ctx context.Context, pool *pgxpool.Pool) (*pgx.Conn, error) {
	config := pool.Config()
	if config.BeforeConnect != nil {
		if err := config.BeforeConnect(ctx, config.ConnConfig); err != nil {
			return nil, err
		}
	}
	conn, err := pgx.ConnectConfig(ctx, config.ConnConfig)
	if err != nil {
		return nil, err
	}
	for {
		var locked bool
		err := conn.QueryRow(ctx, "SELECT pg_try_advisory_lock($1)", migrateLock).Scan(&locked)
		if err == nil && !locked {
			err = pause(ctx, lockPause)
		}
		if err != nil {
			_ = conn.Close(context.WithoutCancel(ctx))
			return nil, err
		}
		if locked {
			return conn, nil
		}
	}
}

// pause waits for d, or returns why ctx ended.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// createSchema creates the schema when it is missing. It looks first, because CREATE SCHEMA asks for the
// privilege even when there is nothing to create.
func createSchema(ctx context.Context, conn *pgx.Conn, schema string) error {
	var exists bool
	if err := conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)",
		schema).Scan(&exists); err != nil || exists {
		return err
	}
	_, err := conn.Exec(ctx, "CREATE SCHEMA IF NOT EXISTS "+pgx.Identifier{schema}.Sanitize())
	return err
}
