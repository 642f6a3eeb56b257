package inspect_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/refusals"
)

// unreachable is a DB that fails the test that sends it anything.
type unreachable struct{ t *testing.T }

func (u unreachable) Query(_ context.Context, sql string, _ ...any) (pgx.Rows, error) {
	u.t.Errorf("it was sent %q", sql)
	return nil, context.Canceled
}

// What cannot be answered is refused before anything is sent.
func TestInvalid(t *testing.T) {
	t.Parallel()
	_, err := inspect.New(nil, "")
	require.ErrorIs(t, err, inspect.ErrInvalid)
	for _, schema := range []string{"Ratelimit", "a b", `a"b`, "a;b", strings.Repeat("a", 64), "1a", "a\x00"} {
		_, err := inspect.New(unreachable{t}, schema)
		require.ErrorIs(t, err, inspect.ErrInvalid, schema)
	}
	r, ctx := newReader(t, unreachable{t}, ""), t.Context()
	longName, longKey, key := strings.Repeat("a", 65), strings.Repeat("a", 257), "key"
	for _, bad := range []string{"a\x00", "a\xff", longKey} {
		badName := strings.ReplaceAll(bad, longKey, longName)
		for name, query := range map[string]func() error{
			"Limits":         func() error { _, err := r.Limits(ctx, badName, 0); return err },
			"Bucket":         func() error { _, err := r.Bucket(ctx, badName, key); return err },
			"Bucket/Key":     func() error { _, err := r.Bucket(ctx, "words", bad); return err },
			"Upstream":       func() error { _, _, err := r.Upstream(ctx, badName, key); return err },
			"Upstream/Key":   func() error { _, _, err := r.Upstream(ctx, "words", bad); return err },
			"Buckets":        func() error { _, err := r.Buckets(ctx, inspect.BucketQuery{Limit: badName}); return err },
			"Buckets/Prefix": func() error { _, err := r.Buckets(ctx, inspect.BucketQuery{Prefix: bad}); return err },
			"Buckets/After":  func() error { _, err := r.Buckets(ctx, inspect.BucketQuery{After: &bad}); return err },
			"Owing":          func() error { _, err := r.Owing(ctx, inspect.OwingQuery{Limit: badName}); return err },
			"Owing/After": func() error {
				_, err := r.Owing(ctx, inspect.OwingQuery{After: &inspect.Position{Limit: badName}})
				return err
			},
			"Owing/AfterKey": func() error {
				_, err := r.Owing(ctx, inspect.OwingQuery{After: &inspect.Position{Key: bad}})
				return err
			},
			"Reservations":       func() error { _, err := r.Reservations(ctx, inspect.ReservationQuery{Limit: badName}); return err },
			"Reservations/Key":   func() error { _, err := r.Reservations(ctx, inspect.ReservationQuery{Key: &bad}); return err },
			"Reservations/State": func() error { _, err := r.Reservations(ctx, inspect.ReservationQuery{State: bad}); return err },
			"Reservations/After": func() error {
				_, err := r.Reservations(ctx, inspect.ReservationQuery{After: &inspect.ReservationPosition{ExpiresAt: noon, ID: bad}})
				return err
			},
			"Refusals":     func() error { _, _, err := r.Refusals(ctx, inspect.RefusalQuery{Limit: badName}); return err },
			"Refusals/Key": func() error { _, _, err := r.Refusals(ctx, inspect.RefusalQuery{Key: &bad}); return err },
		} {
			require.ErrorIs(t, query(), inspect.ErrInvalid, "%s of %q", name, bad)
		}
	}
	for name, query := range map[string]func() error{
		"Limits": func() error { _, err := r.Limits(ctx, "", 1001); return err },
		"Fewer":  func() error { _, err := r.Limits(ctx, "", -1); return err },
		"Buckets": func() error {
			_, err := r.Buckets(ctx, inspect.BucketQuery{Limit: "words", Most: 1001})
			return err
		},
		"Look":         func() error { _, err := r.Owing(ctx, inspect.OwingQuery{Look: 1_000_001}); return err },
		"Owing":        func() error { _, err := r.Owing(ctx, inspect.OwingQuery{Most: 10_001}); return err },
		"Reservations": func() error { _, err := r.Reservations(ctx, inspect.ReservationQuery{Most: 1001}); return err },
		"AnotherLimit": func() error {
			_, err := r.Owing(ctx, inspect.OwingQuery{Limit: "words", After: &inspect.Position{Limit: "calls"}})
			return err
		},
		"LongerThanADay": func() error {
			_, _, err := r.Refusals(ctx, inspect.RefusalQuery{Since: noon, Until: noon.Add(24*time.Hour + 1)})
			return err
		},
		"SinceEver": func() error { _, _, err := r.Refusals(ctx, inspect.RefusalQuery{Until: noon}); return err },
	} {
		require.ErrorIs(t, query(), inspect.ErrInvalid, name)
	}
	_, _, err = r.TopRefused(ctx, refusals.TopConfig{By: "name"})
	require.ErrorIs(t, err, ratelimit.ErrInvalidRequest)
}

// Each query reads the schema of its Reader, not the search path, also if the name is an SQL keyword.
func TestSchema(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.exec(t, `CREATE SCHEMA "user"`)
	require.NoError(t, migrations.Up(t.Context(), f.pool, migrations.Config{Schema: "user"}))
	f.put(t, "words", "ada", 1)
	reader := newReader(t, f.pool, "user")
	names, err := reader.Limits(t.Context(), "", 0)
	require.NoError(t, err)
	require.Empty(t, names)
	f.exec(t, "DROP SCHEMA ratelimit CASCADE")
	for _, query := range queries() {
		require.NoError(t, query.run(t.Context(), reader), query.name)
		if query.name != "Now" {
			err := query.run(t.Context(), f.Reader)
			require.ErrorIs(t, err, ratelimit.ErrNotMigrated, query.name)
			require.ErrorContains(t, err, `schema "ratelimit"`, query.name)
		}
	}
}

// A role that may only read can run all queries. A role without privileges gets an error that names the missing one.
func TestAsAReader(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.seed(t, 2000, 100)
	all := queries()
	role := strings.ReplaceAll(f.pool.Config().ConnConfig.Database, "ratelimit_", "")
	role = role[max(0, len(role)-20):] + " reader" // the end of it is random
	quoted := pgx.Identifier{role}.Sanitize()
	f.exec(t, "CREATE ROLE "+quoted)
	t.Cleanup(func() {
		_, err := f.pool.Exec(context.WithoutCancel(t.Context()), "DROP OWNED BY "+quoted+"; DROP ROLE "+quoted)
		require.NoError(t, err)
	})
	as, err := f.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer as.Release()
	_, err = as.Exec(t.Context(), "SET default_transaction_read_only = on")
	require.NoError(t, err)
	_, err = as.Exec(t.Context(), "SET ROLE "+quoted)
	require.NoError(t, err)
	reader := newReader(t, as, "")
	for _, query := range all {
		if query.name != "Now" {
			err := query.run(t.Context(), reader)
			require.ErrorContains(t, err, "SQLSTATE 42501", query.name)
			require.ErrorContains(t, err, "migrations.Grants has the statements", query.name)
		}
	}
	statements, err := migrations.Grants(migrations.Config{}, migrations.Roles{Reader: role})
	require.NoError(t, err)
	f.exec(t, statements)
	for _, query := range all {
		require.NoError(t, query.run(t.Context(), reader), query.name)
	}
	_, err = as.Exec(t.Context(), "RESET ROLE")
	require.NoError(t, err)
	_, err = as.Exec(t.Context(), "RESET default_transaction_read_only")
	require.NoError(t, err)
}
