package rules_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/observe/refusals"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// readers are calls that read tables on a pool, in a program that has just started.
func readers(pool *pgxpool.Pool) map[string]func(ctx context.Context) error {
	limited := func(call func(ctx context.Context, l *ratelimit.Limiter) error) func(context.Context) error {
		return func(ctx context.Context) error {
			limiter, err := ratelimit.New(pool, ratelimit.Config{})
			if err != nil {
				return err
			}
			return call(ctx, limiter)
		}
	}
	stored := func(call func(ctx context.Context, s *rules.Store) error) func(context.Context) error {
		return func(ctx context.Context) error {
			store, err := rules.NewStore(pool, rules.StoreConfig{})
			if err != nil {
				return err
			}
			return call(ctx, store)
		}
	}
	return map[string]func(ctx context.Context) error{
		"Load": func(ctx context.Context) error {
			set, err := rules.NewSet(pool, rules.Config{})
			if err != nil {
				return err
			}
			return set.Load(ctx)
		},
		"List":    stored(func(ctx context.Context, s *rules.Store) error { return errorOf(s.List(ctx, rules.ListQuery{})) }),
		"History": stored(func(ctx context.Context, s *rules.Store) error { return errorOf(s.History(ctx, rules.HistoryQuery{})) }),
		"Put": stored(func(ctx context.Context, s *rules.Store) error {
			return errorOf(s.Put(ctx, why, perMinute("messages", "", 7)))
		}),
		"Take": limited(func(ctx context.Context, l *ratelimit.Limiter) error {
			return errorOf(l.Take(ctx, messages.For("ana")))
		}),
		"Check": limited(func(ctx context.Context, l *ratelimit.Limiter) error {
			return errorOf(l.Check(ctx, messages.For("ana")))
		}),
		"Value": limited(func(ctx context.Context, l *ratelimit.Limiter) error {
			return errorOf(l.Value(ctx, messages.For("ana")))
		}),
		"Reset": limited(func(ctx context.Context, l *ratelimit.Limiter) error { return l.Reset(ctx, messages.For("ana")) }),
		"Reserve": limited(func(ctx context.Context, l *ratelimit.Limiter) error {
			return errorOf(l.Reserve(ctx, messages.For("ana")))
		}),
		"Prune":  limited(func(ctx context.Context, l *ratelimit.Limiter) error { return errorOf(l.Prune(ctx, messages)) }),
		"Expire": limited(func(ctx context.Context, l *ratelimit.Limiter) error { return errorOf(l.Expire(ctx)) }),
		"Top":    func(ctx context.Context) error { return errorOf(refusals.Top(ctx, pool, "", refusals.TopConfig{})) },
		"Counter": func(ctx context.Context) error {
			counter, err := refusals.New(pool, refusals.Config{})
			if err != nil {
				return err
			}
			return errorOf(counter.Prune(ctx, time.Now()))
		},
		"Buckets": func(ctx context.Context) error {
			reader, err := inspect.New(pool, "")
			if err != nil {
				return err
			}
			return errorOf(reader.Buckets(ctx, inspect.BucketQuery{Limit: "messages"}))
		},
	}
}

// as returns a pool of a role, which has all privileges and is dropped with its database.
func (f *fixture) as(t *testing.T, options string) (role string, pool *pgxpool.Pool) {
	t.Helper()
	role, pool = postgrestest.NewRole(t, f.pool, options)
	grants, err := migrations.Grants(migrations.Config{}, migrations.Roles{Application: role, Operator: role})
	require.NoError(t, err)
	f.exec(t, grants, pgx.QueryExecModeSimpleProtocol)
	return role, pool
}

var tables = []string{"buckets", "reservations", "fingerprint", "upstreams", "rules", "rules_version", "refusals"}

func (f *fixture) onEachTable(t *testing.T, format string) {
	t.Helper()
	for _, table := range tables {
		f.exec(t, fmt.Sprintf(format, "ratelimit."+table))
	}
}

// Row level security hides rows without an error, so rules would not count and buckets would be full.
func TestHiddenRowsAreAnError(t *testing.T) {
	t.Parallel()
	f := setup(t)
	made(t)(f.store.Put(t.Context(), why, perMinute("messages", "", 5)))
	role, pool := f.as(t, "")
	_, above := f.as(t, "BYPASSRLS")
	each := func(t *testing.T, what string, check func(t require.TestingT, err error, what ...any), pools ...*pgxpool.Pool) {
		t.Helper()
		for _, pool := range pools {
			for name, read := range readers(pool) {
				check(t, read(t.Context()), what+", "+name)
			}
		}
	}
	hidden := func(t require.TestingT, err error, what ...any) {
		require.ErrorContains(t, err, "row level security", what...)
		require.ErrorContains(t, err, "42501", what...)
		require.ErrorContains(t, err, "DISABLE ROW LEVEL SECURITY", what...)
	}
	works := func(t require.TestingT, err error, what ...any) { require.NoError(t, err, what...) }

	each(t, "without", works, pool)
	f.onEachTable(t, "ALTER TABLE %s ENABLE ROW LEVEL SECURITY")
	each(t, "no policy", hidden, pool)
	each(t, "no policy", works, above, f.pool)
	f.onEachTable(t, "CREATE POLICY reads ON %s FOR SELECT USING (true)")
	each(t, "cannot change rows", hidden, pool)
	f.onEachTable(t, "CREATE POLICY maybe ON %s USING (current_user <> '' AND random() < 2)")
	each(t, "may hide some", hidden, pool)
	f.onEachTable(t, "CREATE POLICY every ON %s TO "+role+" USING (true)")
	each(t, "all rows", works, pool)
	f.onEachTable(t, "CREATE POLICY fewer ON %s AS RESTRICTIVE USING (random() < 2)")
	each(t, "restricted", hidden, pool)
	f.onEachTable(t, "DROP POLICY fewer ON %s")
	f.onEachTable(t, "DROP POLICY every ON %s")
	f.onEachTable(t, "ALTER TABLE %s OWNER TO "+role)
	each(t, "owner", works, pool)
	f.onEachTable(t, "ALTER TABLE %s FORCE ROW LEVEL SECURITY")
	each(t, "forced", hidden, pool)
	each(t, "forced", works, above)
}

// A program that runs keeps its rules if row level security hides them from now on, or if the tables have none.
func TestHiddenRulesStayLoaded(t *testing.T) {
	t.Parallel()
	f := setup(t)
	applied := made(t)(f.store.Put(t.Context(), why, perMinute("messages", "", 5)))
	_, pool := f.as(t, "")
	owner := f.pool
	f.pool = pool
	var err error
	f.set, err = rules.NewSet(pool, rules.Config{Observer: f.events})
	require.NoError(t, err)
	f.load(t)
	keeps := func(cause string) {
		t.Helper()
		require.ErrorContains(t, f.set.Load(t.Context()), cause)
		require.ErrorContains(t, f.events.last(t).Err, cause)
		require.Equal(t, int64(1), f.set.Version())
		require.Equal(t, 5.0, f.capacity(t, applied.From, messages.For("ana")))
	}
	for _, table := range []string{"rules", "rules_version"} {
		_, err := owner.Exec(t.Context(), "ALTER TABLE ratelimit."+table+" ENABLE ROW LEVEL SECURITY")
		require.NoError(t, err)
		keeps("row level security")
		_, err = owner.Exec(t.Context(), "ALTER TABLE ratelimit."+table+" DISABLE ROW LEVEL SECURITY")
		require.NoError(t, err)
		f.load(t)
	}
	_, err = owner.Exec(t.Context(), "TRUNCATE ratelimit.rules, ratelimit.rules_version")
	require.NoError(t, err)
	keeps("version 1 is loaded")
}

// A Limiter that has passed the check of its first call reads no filtered rows either.
func TestRowSecurityUnderALimiterThatRuns(t *testing.T) {
	t.Parallel()
	f := setup(t)
	_, pool := f.as(t, "")
	limiter, err := ratelimit.New(pool, ratelimit.Config{})
	require.NoError(t, err)
	reads := map[string]func() error{
		"Check":  func() error { return errorOf(limiter.Check(t.Context(), messages.For("ana"))) },
		"Value":  func() error { return errorOf(limiter.Value(t.Context(), messages.For("ana"))) },
		"Prune":  func() error { return errorOf(limiter.Prune(t.Context(), messages)) },
		"Expire": func() error { return errorOf(limiter.Expire(t.Context())) },
		"InTx": func() error {
			return pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				return errorOf(limiter.WithTx(tx).Check(t.Context(), messages.For("ana")))
			})
		},
	}
	each := func(what string, check func(name string, err error)) {
		for name, read := range reads {
			check(what+", "+name, read())
		}
	}
	works := func(name string, err error) { require.NoError(t, err, name) }
	each("without", works)
	f.onEachTable(t, "ALTER TABLE %s ENABLE ROW LEVEL SECURITY")
	each("no policy", func(name string, err error) {
		require.ErrorContains(t, err, "row level security may hide rows of buckets", name)
		require.ErrorContains(t, err, "42501", name)
	})
	f.onEachTable(t, "CREATE POLICY every ON %s USING (true)")
	each("all rows", works)
}
