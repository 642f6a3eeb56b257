package postgrestest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

// play is the part of a test that a real one plays: it can fail without failing the test that it is in.
type play struct {
	testing.TB
	failed, skipped bool
	log             strings.Builder
	cleanups        []func()
}

// perform runs a test and its cleanups, as the testing package would.
func perform(t *testing.T, test func(t testing.TB)) *play {
	t.Helper()
	p := &play{TB: t}
	done := make(chan struct{})
	go func() {
		defer close(done)
		test(p)
	}()
	<-done
	for i := len(p.cleanups) - 1; i >= 0; i-- {
		p.cleanups[i]()
	}
	return p
}

func (p *play) Helper()               {}
func (p *play) Failed() bool          { return p.failed }
func (p *play) Cleanup(f func())      { p.cleanups = append(p.cleanups, f) }
func (p *play) Log(args ...any)       { fmt.Fprintln(&p.log, args...) }
func (p *play) Errorf(string, ...any) { p.failed = true }

func (p *play) Logf(format string, args ...any) { fmt.Fprintf(&p.log, format+"\n", args...) }

func (p *play) Skip(args ...any) {
	p.skipped = true
	p.Log(args...)
	runtime.Goexit()
}

func (p *play) Fatal(args ...any) {
	p.failed = true
	p.Log(args...)
	runtime.Goexit()
}

func exists(t *testing.T, server *Server, database string) (found bool) {
	t.Helper()
	const query = "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)"
	require.NoError(t, admin(t.Context(), server, func(conn *pgx.Conn) error {
		return conn.QueryRow(t.Context(), query, database).Scan(&found)
	}))
	return found
}

// A database of a test that fails is kept, and its rows are logged. A server found by URL is not ours to stop.
func TestADatabaseIsKeptWhenItsTestFails(t *testing.T) {
	t.Parallel()
	server, err := start(t.Context(), Options{}, environment{url: shared.get(t).server.url, urlVariable: "DATABASE_URL"})
	require.NoError(t, err)
	require.Contains(t, server.String(), "named by DATABASE_URL")
	require.ErrorIs(t, server.Stop(t.Context(), Kill), errNotOwn)
	require.ErrorIs(t, server.Restart(t.Context()), errNotOwn)
	require.NoError(t, server.Close())
	name, err := ensureTemplate(t.Context(), server)
	require.NoError(t, err)
	var pool *pgxpool.Pool
	played := perform(t, func(fake testing.TB) {
		pool = openPool(fake, newDatabase(fake, server, name), nil)
		_, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.buckets (name, key, shard, value, ts, capacity) VALUES ('logins', 'it''s', 2, -1.5, 7, 10)`)
		require.NoError(t, err)
		fake.Errorf("on purpose")
	})
	database := pool.Config().ConnConfig.Database
	require.True(t, exists(t, server, database))
	require.Contains(t, played.log.String(), `'logins' 'it''s' 2 -1.5 7`)
	require.Contains(t, played.log.String(), database)
	require.NoError(t, dropDatabase(t.Context(), server, database))
}

func TestADatabaseIsDroppedWhenItsTestPassesWithConnectionsLeftOpen(t *testing.T) {
	t.Parallel()
	server := shared.get(t).server
	var database string
	played := perform(t, func(fake testing.TB) {
		conn, err := pgx.Connect(t.Context(), newDatabase(fake, server, emptyTemplate))
		require.NoError(t, err)
		database = conn.Config().Database
	})
	require.False(t, played.failed)
	require.False(t, exists(t, server, database))
}

// Several processes that share a server make one template, also if one of them was killed while it made the template.
func TestTemplateIsMadeOnce(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "a server of its own")
	const unfinished = "ratelimit_template_unfinished"
	server := StartOwn(t, nil)
	require.NoError(t, createDatabase(t.Context(), server, unfinished, emptyTemplate))
	var group errgroup.Group
	for i := range 8 {
		group.Go(func() error {
			name, err := ensureTemplate(t.Context(), server)
			if err == nil {
				err = createDatabase(t.Context(), server, fmt.Sprint("a_clone_", i), name)
			}
			return err
		})
	}
	require.NoError(t, group.Wait())
	require.False(t, exists(t, server, unfinished))
}

func TestGiveUp(t *testing.T) {
	t.Parallel()
	none := noServer(environment{}, errors.New("no programs here"))
	require.ErrorIs(t, none, ErrNoServer)
	named := noServer(environment{url: "postgres://a", urlVariable: "DATABASE_URL"}, errors.New("no programs here"))
	for _, part := range []string{"DATABASE_URL is", "no programs here", "apt-get install", "docker run"} {
		require.ErrorContains(t, none, part)
		require.ErrorContains(t, named, part)
	}
	broken := fmt.Errorf("DATABASE_URL: %w", context.DeadlineExceeded)
	for name, test := range map[string]struct {
		err     error
		ci      bool
		skipped bool
	}{
		"SkipsAtADeskWithoutAServer":             {none, false, true},
		"FailsInCIWithoutAServer":                {none, true, false},
		"FailsAtADeskWithoutTheOneItWasPromised": {broken, false, false},
		"FailsInCIWithoutTheOneItWasPromised":    {broken, true, false},
	} {
		played := perform(t, func(t testing.TB) { giveUp(t, test.err, test.ci) })
		require.Equal(t, test.skipped, played.skipped, name)
		require.Equal(t, !test.skipped, played.failed, name)
		require.Contains(t, played.log.String(), test.err.Error(), name)
	}
}

// A test that is told that there is no server looks for none.
func TestNoServer(t *testing.T) {
	t.Parallel()
	env := environmentFrom(func(name string) string {
		return map[string]string{NoneVariable: "1", "DATABASE_URL": "postgres://127.0.0.1:1/db"}[name]
	})
	_, err := start(t.Context(), Options{}, env)
	require.EqualError(t, err, "no Postgres to use: RATELIMIT_NO_POSTGRES is set, so none is looked for")
	require.ErrorIs(t, err, ErrNoServer)
}

func TestWithDatabase(t *testing.T) {
	t.Setenv("PGSSLMODE", "")
	for connString, want := range map[string]string{
		"postgres://u:secret@host:5433/app?sslmode=disable": "postgres://u:secret@host:5433/mine?sslmode=disable",
		"postgresql://host": "postgresql://host/mine?sslmode=prefer",
		"postgres://host/app?dbname=other&database=more":   "postgres://host/mine?sslmode=prefer",
		"postgres:///app?host=/run/postgresql":             "postgres:///mine?host=%2Frun%2Fpostgresql&sslmode=prefer",
		"host=localhost dbname=app user=u password=secret": "host=localhost dbname=app user=u password=secret dbname=mine sslmode=prefer",
		"host=localhost sslmode=disable":                   "host=localhost sslmode=disable dbname=mine",
	} {
		require.Equal(t, want, withDatabase(connString, "mine"))
		config, err := pgx.ParseConfig(want)
		require.NoError(t, err)
		require.Equal(t, "mine", config.Database)
		require.NotContains(t, redacted(want), "secret")
		require.Contains(t, redacted(want), "mine")
	}
}

func TestStart(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		env      environment
		canceled bool
		says     string
	}{
		"StopsWhenTheContextDoes":        {environment{}, true, "context canceled"},
		"TriesNothingElseWhenAURLIsSet":  {environment{url: "postgres://user:secret@127.0.0.1:1/db", urlVariable: "DATABASE_URL"}, false, "DATABASE_URL: "},
		"TriesOnlyTheProgramsThatAreSet": {environment{binDir: t.TempDir()}, false, "RATELIMIT_POSTGRES_BINDIR: "},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		if test.canceled {
			cancel()
		}
		_, err := start(ctx, Options{}, test.env)
		require.ErrorContains(t, err, test.says, name)
		require.NotErrorIs(t, err, ErrNoServer, "what was asked for and not found is not to be skipped")
		require.NotContains(t, err.Error(), "secret", name)
	}
}

func TestChosenSettings(t *testing.T) {
	t.Parallel()
	chosen, err := chosenSettings("jit=on, default_transaction_isolation = repeatable read,search_path=it's")
	require.NoError(t, err)
	require.Equal(t, map[string]string{"jit": "on", "default_transaction_isolation": "repeatable read", "search_path": "it's"}, chosen)
	require.Equal(t, []string{
		`ALTER DATABASE "a" SET "default_transaction_isolation" = 'repeatable read'`,
		`ALTER DATABASE "a" SET "jit" = 'on'`,
		`ALTER DATABASE "a" SET "search_path" = 'it''s'`,
	}, alterDatabase("a", chosen))
	none, err := chosenSettings("")
	require.NoError(t, err)
	require.Empty(t, alterDatabase("a", none))
	for _, text := range []string{"jit", "jit=", "=on"} {
		_, err := chosenSettings(text)
		require.ErrorContains(t, err, "RATELIMIT_SETTINGS="+text)
	}
}

// TestBuildsForOtherSystems builds the package for systems on which tests use a server named by URL.
func TestBuildsForOtherSystems(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "compiles the package and its dependencies for other systems")
	for _, system := range []string{"windows", "darwin"} {
		t.Run(system, func(t *testing.T) {
			t.Parallel()
			build := exec.CommandContext(t.Context(), "go", "build", ".")
			build.Env = append(os.Environ(), "GOOS="+system, "CGO_ENABLED=0")
			out, err := build.CombinedOutput()
			require.NoError(t, err, "%s", out)
		})
	}
}
