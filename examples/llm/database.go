package main

import (
	"context"
	_ "embed"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

const poolSize = 24

//go:embed schema.sql
var schema string

// migrate makes the limiter's tables, River's, and the application's. That, and pgxpool.New, is all a service does
// of this.
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
