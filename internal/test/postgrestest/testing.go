package postgrestest

import (
	"context"
	"errors"
	"maps"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// A test whose preparation or cleanup takes longer than this fails.
const (
	setupTimeout   = 5 * time.Minute
	cleanupTimeout = 2 * time.Minute
)

// maxConns is the default size of a test's pool. It is small because parallel tests share the
// connections of one server.
const maxConns = 8

// New returns a pool on a database of the test's own, with every migration applied. When the test
// ends, the pool is closed and the database dropped. If the test failed, the rows of the buckets are
// logged first, and a database on a server named by URL is kept.
//
// Each configure may change the pool's configuration before the pool is made.
func New(t testing.TB, configure ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	return shared.New(t, configure...)
}

// NewEmpty is New without the migrations: the database is empty.
func NewEmpty(t testing.TB, configure ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	return openPool(t, NewEmptyDatabase(t), configure)
}

// NewDatabase is New for tests that connect by themselves: it returns the database's connection
// string. Connections that are open when the test ends are cut.
func NewDatabase(t testing.TB) string {
	t.Helper()
	return shared.NewDatabase(t)
}

// NewEmptyDatabase is NewDatabase without the migrations.
func NewEmptyDatabase(t testing.TB) string {
	t.Helper()
	return newDatabase(t, shared.get(t).server, emptyTemplate)
}

// StartOwn starts a server that only this test uses, so that the test can stop, kill and reconfigure it.
// The settings are added to this package's own. The server is closed when the test ends. If the test
// failed, the last lines of the server's log are in the log of the test.
func StartOwn(t testing.TB, settings map[string]string) *Server {
	t.Helper()
	return StartWith(t, Options{Settings: settings})
}

// StartWith is StartOwn with all options. If this machine does not support them, the test is skipped, with the reason.
// If CI is set, the test fails.
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
		GiveUp(t, err)
	}
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
	return server
}

// template is a database to clone, and its server.
type template struct {
	server *Server
	name   string
}

// Shared is a server that the tests of a process share. It ends with the process.
type Shared struct{ template func() (*template, error) }

// NewShared returns a Shared. Its first test calls start.
func NewShared(start func(ctx context.Context) (*Server, error)) *Shared {
	return &Shared{sync.OnceValues(func() (*template, error) {
		// Not a test's context: the other tests use the server too.
		ctx, cancel := context.WithTimeout(context.Background(), 2*setupTimeout)
		defer cancel()
		server, err := start(ctx)
		if err != nil {
			return nil, err
		}
		name, err := ensureTemplate(ctx, server)
		if err != nil {
			return nil, errors.Join(err, server.Close())
		}
		return &template{server, name}, nil
	})}
}

// NewDatabase is the function NewDatabase on this server.
func (s *Shared) NewDatabase(t testing.TB) string {
	t.Helper()
	template := s.get(t)
	return newDatabase(t, template.server, template.name)
}

// New is the function New on this server.
func (s *Shared) New(t testing.TB, configure ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	return openPool(t, s.NewDatabase(t), configure)
}

func (s *Shared) get(t testing.TB) *template {
	t.Helper()
	template, err := s.template()
	if err != nil {
		GiveUp(t, err)
	}
	return template
}

// shared is the server that Start returns.
//
//nolint:gochecknoglobals // one server for all tests of the process is the point
var shared = NewShared(func(ctx context.Context) (*Server, error) { return Start(ctx, Options{}) })

// GiveUp ends a test that cannot have its server because of err. It skips the test if this machine has no server, or
// lacks support for one. It fails the test if CI is set, or a variable asked for a server.
func GiveUp(t testing.TB, err error) {
	t.Helper()
	giveUp(t, err, os.Getenv("CI") != "")
}

// giveUp skips the test if this machine has no server or lacks support for one. It fails the test if ci is
// set or a variable asked for a server, because a skipped test looks like a passed one.
func giveUp(t testing.TB, err error, ci bool) {
	t.Helper()
	for _, missing := range []error{ErrNoServer, errNotHere} {
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

// closePool fails the test if a connection is still in use, because Close would wait for it forever.
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
