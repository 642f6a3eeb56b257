package main

import (
	"context"
	"crypto/rand"
	_ "embed"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

const (
	poolSize    = 24
	dropTimeout = 10 * time.Second
)

//go:embed schema.sql
var schema string

// database is one that the demo made for itself, so that it can be run on any server. A service has
// one already: all it does of this is pgxpool.New and migrate.
type database struct {
	pool   *pgxpool.Pool
	server string
	name   string
}

// newDatabase makes a database on the server at url, with everybody's tables.
func newDatabase(ctx context.Context, url string) (_ *database, err error) {
	db := &database{server: url, name: "llm_demo_" + strings.ToLower(rand.Text()[:8])}
	if err := db.execOnServer(ctx, "CREATE DATABASE "+pgx.Identifier{db.name}.Sanitize()); err != nil {
		return nil, fmt.Errorf("create the demo's database: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, db.drop(ctx))
		}
	}()
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("read the database URL: %w", err)
	}
	config.ConnConfig.Database, config.MaxConns = db.name, poolSize
	if db.pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return nil, fmt.Errorf("connect to the demo's database: %w", err)
	}
	return db, migrate(ctx, db.pool)
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

// drop drops the database, also when ctx has ended.
func (db *database) drop(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dropTimeout)
	defer cancel()
	if db.pool != nil {
		db.pool.Close()
	}
	if err := db.execOnServer(ctx, "DROP DATABASE "+pgx.Identifier{db.name}.Sanitize()+" WITH (FORCE)"); err != nil {
		return fmt.Errorf("drop the demo's database: %w", err)
	}
	return nil
}

// execOnServer runs sql on a connection to the database that the server's URL names.
func (db *database) execOnServer(ctx context.Context, sql string) (err error) {
	conn, err := pgx.Connect(ctx, db.server)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	_, err = conn.Exec(ctx, sql)
	return err
}
