package postgrestest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/migrations"
)

// The variables for Citus. The package does not look for it, because few machines have it.
const (
	// citusBinDir names the directory with the programs of a server that Citus is installed in.
	citusBinDir = "RATELIMIT_CITUS_BINDIR"
	// citusForAll, when set, has all tests run on a server with Citus, with the tables distributed.
	citusForAll = "RATELIMIT_CITUS_ALL"
)

// Citus is a coordinator, and workers that have the shards. They know where these are, so that each takes statements.
// Without workers the coordinator has the shards.
type Citus struct {
	Coordinator *Server
	Workers     []*Server
}

// citusSettings are what servers need for Citus.
func citusSettings(more map[string]string) map[string]string {
	settings := map[string]string{
		"shared_preload_libraries":  "citus",
		"max_prepared_transactions": "200",
		"wal_level":                 "logical",
		"max_worker_processes":      "200",
		"citus.node_conninfo":       "sslmode=disable",
	}
	maps.Copy(settings, more)
	return settings
}

// StartCitus starts a coordinator and workers that only this test uses, with the tables migrated and distributed. They
// are closed when the test ends. Without the variable RATELIMIT_CITUS_BINDIR the test is skipped.
func StartCitus(t testing.TB, workers int) *Citus {
	t.Helper()
	binDir := os.Getenv(citusBinDir)
	if binDir == "" {
		t.Skipf("no Citus: set %s to the directory of its server programs", citusBinDir)
	}
	ctx, cancel := context.WithTimeout(t.Context(), setupTimeout)
	defer cancel()
	start := func() *Server {
		server, err := startCitusNode(ctx, binDir, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := server.Close(); err != nil {
				t.Errorf("clean up: %v", err)
			}
		})
		return server
	}
	c := &Citus{Coordinator: start()}
	for range workers {
		c.Workers = append(c.Workers, start())
	}
	if err := c.join(ctx); err != nil {
		t.Fatal(err)
	}
	return c
}

// startCitusNode starts a server that Citus can be created on.
func startCitusNode(ctx context.Context, binDir string, settings map[string]string) (*Server, error) {
	if err := checkBinDir(binDir); err != nil {
		return nil, fmt.Errorf("%s: %w", citusBinDir, err)
	}
	server, err := startCluster(ctx, binDir, Options{Settings: citusSettings(settings)})
	if err != nil {
		return nil, err
	}
	if err := trustItself(ctx, server); err != nil {
		return nil, errors.Join(err, server.Close())
	}
	server.hasCitus = true
	return server, nil
}

// join makes one cluster of the servers.
func (c *Citus) join(ctx context.Context) error {
	for _, worker := range c.Workers {
		err := admin(ctx, worker, func(conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `CREATE EXTENSION citus`)
			return err
		})
		if err != nil {
			return fmt.Errorf("create Citus on %s: %w", worker, err)
		}
	}
	return distribute(ctx, c.Coordinator.url, c.Workers)
}

// trustItself makes the server accept connections from its own machine without a password, because the servers of a
// cluster do not have each other's passwords. Other clients need a password.
func trustItself(ctx context.Context, server *Server) error {
	return admin(ctx, server, func(conn *pgx.Conn) error {
		var file string
		if err := conn.QueryRow(ctx, `SHOW hba_file`).Scan(&file); err != nil {
			return err
		}
		const lines = `COPY (VALUES ('host all all 127.0.0.1/32 trust'), ('host all all all scram-sha-256')) TO '%s'`
		if _, err := conn.Exec(ctx, fmt.Sprintf(lines, strings.ReplaceAll(file, "'", "''"))); err != nil {
			return err
		}
		_, err := conn.Exec(ctx, `SELECT pg_reload_conf()`)
		return err
	})
}

// portOf returns the port that the server has on its own machine, where the others of its cluster are.
func portOf(ctx context.Context, url string) (port int, err error) {
	err = ask(ctx, url, `SELECT current_setting('port')::integer`, &port)
	return port, err
}

// distribute creates Citus in the database at url, with workers or without, migrates it, and distributes the tables.
func distribute(ctx context.Context, url string, workers []*Server) error {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	port, err := portOf(ctx, url)
	if err != nil {
		return err
	}
	exec := func(sql string, arguments ...any) {
		if err == nil {
			_, err = pool.Exec(ctx, sql, arguments...)
		}
	}
	exec(`CREATE EXTENSION citus`)
	exec(`SELECT citus_set_coordinator_host('127.0.0.1', $1)`, port)
	for _, worker := range workers {
		port, errPort := portOf(ctx, worker.url)
		err = errors.Join(err, errPort)
		exec(`SELECT citus_add_node('127.0.0.1', $1)`, port)
	}
	if len(workers) == 0 {
		exec(`SELECT citus_set_node_property('127.0.0.1', $1, 'shouldhaveshards', true)`, port)
	}
	if err != nil {
		return fmt.Errorf("set Citus up: %w", err)
	}
	if err := migrations.Up(ctx, pool, migrations.Config{}); err != nil {
		return err
	}
	return migrations.Distribute(ctx, pool, migrations.Config{}, migrations.Distribution{Shards: 8})
}
