package postgrestest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/migrations"
)

// How long a test's preparation and cleanup may take until they count as hanging.
const (
	setupTimeout   = 5 * time.Minute
	cleanupTimeout = 2 * time.Minute
)

// maxConns is how many connections a test's pool has unless the test asks for more. Tests run at
// once, and the connections of a shared server are few.
const maxConns = 8

// New returns a pool on a database of the test's own, with every migration applied. When the test
// ends the pool is closed and the database dropped; when it failed, what the buckets held is logged
// first, and a database on a server named by URL is kept.
//
// Each configure may change the pool's configuration before it is made.
func New(t testing.TB, configure ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	return openPool(t, NewDatabase(t), configure)
}

// NewPartitioned is New with the buckets over so many partitions.
func NewPartitioned(t testing.TB, partitions int, configure ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	server := sharedTemplate(t).server
	ctx, cancel := context.WithTimeout(t.Context(), setupTimeout)
	defer cancel()
	template, err := ensureTemplate(ctx, server, migrations.Config{Partitions: partitions})
	if err != nil {
		t.Fatal(err)
	}
	return openPool(t, newDatabase(t, server, template), configure)
}

// NewEmpty is New without the migrations: the database holds nothing.
func NewEmpty(t testing.TB, configure ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	return openPool(t, NewEmptyDatabase(t), configure)
}

// NewDatabase is New for tests that connect by themselves: it returns the database's connection
// string. Connections that are open when the test ends are cut.
func NewDatabase(t testing.TB) string {
	t.Helper()
	template := sharedTemplate(t)
	return newDatabase(t, template.server, template.name)
}

// NewEmptyDatabase is NewDatabase without the migrations.
func NewEmptyDatabase(t testing.TB) string {
	t.Helper()
	return newDatabase(t, sharedTemplate(t).server, emptyTemplate)
}

// StartOwn starts a server that only this test uses, with settings on top of this package's own, for
// a test to stop, kill and reconfigure. It is closed when the test ends; when the test failed, the
// end of the server's log is in the test's.
func StartOwn(t testing.TB, settings map[string]string) *Server {
	t.Helper()
	return StartWith(t, Options{Settings: settings})
}

// StartWith is StartOwn for all options. Where the machine cannot do what they ask for, the test is skipped, with the reason,
// at a desk, and fails when CI is set.
func StartWith(t testing.TB, opts Options) *Server {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), setupTimeout)
	defer cancel()
	chosen, err := chosenSettings(os.Getenv(chosenVariable))
	if err != nil {
		t.Fatal(err)
	}
	maps.Copy(chosen, opts.Settings)
	opts.Settings, opts.Own = chosen, true
	server, err := Start(ctx, opts)
	if err != nil {
		giveUp(t, err, os.Getenv("CI") != "")
	}
	closeInTheEnd(t, server)
	return server
}

// closeInTheEnd closes the server when the test ends.
func closeInTheEnd(t testing.TB, server *Server) {
	t.Helper()
	t.Cleanup(func() {
		if t.Failed() {
			ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
			defer cancel()
			t.Logf("%s; its log ends with:\n%s", server, server.host.log(ctx))
		}
		if err := server.Close(); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
}

// template is a database to clone, and the server that it is on.
type template struct {
	server *Server
	name   string
}

// Migrations returns how tests make their tables: RATELIMIT_PARTITIONS is over how many partitions the buckets are, where it is set.
// New does so by itself.
func Migrations() (migrations.Config, error) {
	text := os.Getenv("RATELIMIT_PARTITIONS")
	if text == "" {
		return migrations.Config{}, nil
	}
	partitions, err := strconv.Atoi(text)
	if err != nil {
		return migrations.Config{}, fmt.Errorf("RATELIMIT_PARTITIONS: %w", err)
	}
	return migrations.Config{Partitions: partitions}, nil
}

// startShared starts the server that the tests of this process share, for the first that wants it. It
// is never closed: the server ends with the process.
//
//nolint:gochecknoglobals // one server for all tests of the process is the point
var startShared = sync.OnceValues(func() (*template, error) {
	// Not a test's context: the other tests use the server too.
	ctx, cancel := context.WithTimeout(context.Background(), dockerTimeout+downloadTimeout+setupTimeout)
	defer cancel()
	server, err := Start(ctx, Options{})
	if err != nil {
		return nil, err
	}
	cfg, err := Migrations()
	if err != nil {
		return nil, errors.Join(err, server.Close())
	}
	name, err := ensureTemplate(ctx, server, cfg)
	if err != nil {
		return nil, errors.Join(err, server.Close())
	}
	return &template{server, name}, nil
})

func sharedTemplate(t testing.TB) *template {
	t.Helper()
	template, err := startShared()
	if err != nil {
		giveUp(t, err, os.Getenv("CI") != "")
	}
	return template
}

// giveUp skips the test when there is no server and nobody said there would be one; a test that is
// skipped where it counts, or for a server that was asked for, would pass for one that ran.
func giveUp(t testing.TB, err error, ci bool) {
	t.Helper()
	for _, missing := range []error{ErrNoServer, ErrNotHere, ErrNoMount, ErrNoClock} {
		if errors.Is(err, missing) && !ci {
			t.Skip(err)
		}
	}
	t.Fatal(err)
}

func newDatabase(t testing.TB, server *Server, template string) string {
	t.Helper()
	name := databaseName(t.Name())
	ctx, cancel := context.WithTimeout(t.Context(), setupTimeout)
	defer cancel()
	if err := createDatabase(ctx, server, name, template); err != nil {
		t.Fatal(err)
	}
	url := withDatabase(server.url, name)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
		defer cancel()
		if t.Failed() {
			t.Log(report(ctx, url))
			if server.host == nil {
				t.Logf("The test's database is kept: %s", redacted(url))
				return
			}
		}
		if err := dropDatabase(ctx, server, name); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	return url
}

func openPool(t testing.TB, url string, configure []func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatalf("parse the connection string: %v", err)
	}
	config.MaxConns = maxConns
	for _, change := range configure {
		change(config)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatalf("open the pool: %v", err)
	}
	t.Cleanup(func() { closePool(t, pool) })
	return pool
}

// closePool fails the test when it left a connection in use, for which Close would wait forever.
func closePool(t testing.TB, pool *pgxpool.Pool) {
	t.Helper()
	closed := make(chan struct{})
	go func() {
		pool.Close()
		close(closed)
	}()
	select {
	case <-closed:
	case <-time.After(cleanupTimeout):
		t.Errorf("clean up: %d connections of the test's pool are still in use", pool.Stat().AcquiredConns())
	}
}
