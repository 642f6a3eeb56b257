package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

const poolSize = 24

//go:embed schema.sql
var schema string

// newDatabase makes a database for the demo on the server at url, with everybody's tables. A service has
// one already: all it does of this is pgxpool.New and migrate.
func newDatabase(ctx context.Context, url string) (*postgrestest.Scratch, error) {
	db, err := postgrestest.NewScratch(ctx, url, "llm_demo", poolSize)
	if err != nil {
		return nil, err
	}
	if err := migrate(ctx, db.Pool); err != nil {
		return nil, errors.Join(err, db.Drop(ctx))
	}
	return db, nil
}

// migrate makes the limiter's tables, River's, and the application's.
func migrate(ctx context.Context, pool *pgxpool.Pool) error {
	if err := migrations.Up(ctx, pool, migrations.Config{}); err != nil {
		return err
	}
	if err := scheduler.Migrate(ctx, pool, scheduler.MigrateConfig{}); err != nil {
		return err
	}
	if _, err := pool.Exec(ctx, schema); err != nil {
		return fmt.Errorf("create the application's tables: %w", err)
	}
	return nil
}
