// Package server starts the measured servers, and describes their machine.
package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/migrations"
)

const (
	adminConnections = 2
	dropTimeout      = 2 * time.Minute // it waits for a checkpoint
)

// Settings returns the changed settings of the server. Commits are durable.
func Settings() map[string]string {
	return map[string]string{
		"fsync":              "on",
		"full_page_writes":   "on",
		"autovacuum_naptime": "1min",
		"synchronous_commit": "on",
		"shared_buffers":     "1GB",
		"max_connections":    "400",
		// No checkpoint runs during a round, because each scenario begins with one. A checkpoint would slow
		// one random round.
		"checkpoint_timeout": "1h",
		"max_wal_size":       "8GB",
		"min_wal_size":       "1GB",
	}
}

// Postgres is a server that this process started.
type Postgres struct {
	*postgrestest.Server
	// Version is the version that the server reports.
	Version string
	// Directory is the data directory.
	Directory string

	process int
}

// StartPostgres starts a server with its data on disk. Call Close when done; the server ends with this process in any
// case. It returns an error if commits are not durable.
func StartPostgres(ctx context.Context) (*Postgres, error) {
	server, err := postgrestest.Start(ctx, postgrestest.Options{Settings: Settings(), Own: true})
	if err != nil {
		return nil, err
	}
	p := &Postgres{Server: server}
	if err := p.describe(ctx); err != nil {
		return nil, errors.Join(err, server.Close())
	}
	return p, nil
}

// describe asks the server for its version, directory and process.
func (p *Postgres) describe(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, p.URL())
	if err != nil {
		return err
	}
	defer pool.Close()
	var isDurable bool
	const ask = `
		SELECT current_setting('fsync')::boolean AND current_setting('synchronous_commit') = 'on', current_setting('data_directory'),
			'PostgreSQL ' || current_setting('server_version'), split_part(pg_read_file('postmaster.pid'), E'\n', 1)::integer`
	if err := pool.QueryRow(ctx, ask).Scan(&isDurable, &p.Directory, &p.Version, &p.process); err != nil {
		return fmt.Errorf("ask for the server's settings: %w", err)
	}
	if !isDurable {
		return errors.New("fsync and synchronous_commit of the server have to be on")
	}
	return nil
}

// Database is a database with the limiter's tables.
type Database struct {
	pool   *pgxpool.Pool // for statements that are not measured
	server string        // the URL of another database on the server
}

// NewDatabase creates a migrated database without rows. Call Drop when done.
func (p *Postgres) NewDatabase(ctx context.Context) (*Database, error) {
	d := &Database{server: p.URL()}
	config, err := pgxpool.ParseConfig(p.URL())
	if err != nil {
		return nil, err
	}
	config.MaxConns, config.ConnConfig.Database = adminConnections, "bench"
	if err := d.ofServer(ctx, "CREATE DATABASE bench"); err != nil {
		return nil, err
	}
	if d.pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return nil, err
	}
	if err := migrations.Up(ctx, d.pool, migrations.Config{}); err != nil {
		return nil, errors.Join(err, d.Drop(ctx))
	}
	return d, nil
}

// ofServer runs a statement that cannot run in the database itself.
func (d *Database) ofServer(ctx context.Context, statement string) (err error) {
	conn, err := pgx.Connect(ctx, d.server)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close(ctx)) }()
	_, err = conn.Exec(ctx, statement)
	return err
}

// Checkpoint runs a checkpoint. Pages that are filled after it are updated without full-page images in the
// log.
func (d *Database) Checkpoint(ctx context.Context) error {
	if _, err := d.Admin().Exec(ctx, "CHECKPOINT"); err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	return nil
}

// Drop drops the database, even if ctx has ended.
func (d *Database) Drop(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dropTimeout)
	defer cancel()
	d.pool.Close()
	return d.ofServer(ctx, "DROP DATABASE bench WITH (FORCE)")
}

// Settle vacuums and analyzes the filled tables, as autovacuum would later.
func (d *Database) Settle(ctx context.Context) error {
	if _, err := d.Admin().Exec(ctx, "VACUUM (ANALYZE)"); err != nil {
		return fmt.Errorf("vacuum the database: %w", err)
	}
	return nil
}

// Admin returns a pool for statements that are not measured.
func (d *Database) Admin() *pgxpool.Pool { return d.pool }

// Pool returns a pool whose round trips wire counts. configure may change its
// configuration.
func (d *Database) Pool(ctx context.Context, connections int, wire *testkit.RoundTrips,
	configure ...func(*pgxpool.Config),
) (*pgxpool.Pool, error) {
	config := d.pool.Config()
	config.MaxConns = int32(connections)
	config.ConnConfig.DialFunc = wire.Dial
	// Connections are idle during the rounds of other contenders, and a ping would count as a round trip.
	config.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false }
	for _, change := range configure {
		change(config)
	}
	return pgxpool.NewWithConfig(ctx, config)
}

// WAL returns the bytes of write-ahead log since initdb.
func (d *Database) WAL(ctx context.Context) (int64, error) {
	var bytes int64
	if err := d.Admin().QueryRow(ctx, `SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint`).Scan(&bytes); err != nil {
		return 0, fmt.Errorf("ask for the position in the write-ahead log: %w", err)
	}
	return bytes, nil
}
