package inspect_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/observe/refusals"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
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
		for name, err := range map[string]error{
			"Limits":             errOf(r.Limits(ctx, badName, 0)),
			"Bucket":             errOf(r.Bucket(ctx, badName, key)),
			"Bucket/Key":         errOf(r.Bucket(ctx, "words", bad)),
			"Upstream":           errOf(r.Upstream(ctx, badName, key, noon)),
			"Upstream/Key":       errOf(r.Upstream(ctx, "words", bad, noon)),
			"Buckets":            errOf(r.Buckets(ctx, inspect.BucketQuery{Limit: badName})),
			"Buckets/Prefix":     errOf(r.Buckets(ctx, inspect.BucketQuery{Prefix: bad})),
			"Buckets/After":      errOf(r.Buckets(ctx, inspect.BucketQuery{After: &bad})),
			"Reservations":       errOf(r.Reservations(ctx, inspect.ReservationQuery{Limit: badName})),
			"Reservations/Key":   errOf(r.Reservations(ctx, inspect.ReservationQuery{Key: &bad})),
			"Reservations/State": errOf(r.Reservations(ctx, inspect.ReservationQuery{State: bad})),
			"Reservations/After": errOf(r.Reservations(ctx, inspect.ReservationQuery{After: &inspect.ReservationPosition{ExpiresAt: noon, ID: bad}})),
			"Refusals":           errOf(r.Refusals(ctx, inspect.RefusalQuery{Limit: badName})),
			"Refusals/Key":       errOf(r.Refusals(ctx, inspect.RefusalQuery{Key: &bad})),
			"Used":               errOf(r.Used(ctx, inspect.UsedQuery{Limit: badName})),
			"Seen":               errOf(r.Seen(ctx, inspect.SeenQuery{Limit: badName, Keys: []string{key}})),
			"Seen/Key":           errOf(r.Seen(ctx, inspect.SeenQuery{Keys: []string{bad}})),
		} {
			require.ErrorIs(t, err, inspect.ErrInvalid, "%s of %q", name, bad)
		}
	}
	for name, err := range map[string]error{
		"Limits":          errOf(r.Limits(ctx, "", 1001)),
		"Fewer":           errOf(r.Limits(ctx, "", -1)),
		"Buckets":         errOf(r.Buckets(ctx, inspect.BucketQuery{Limit: "words", Most: 1001})),
		"Reservations":    errOf(r.Reservations(ctx, inspect.ReservationQuery{Most: 1001})),
		"LongerThanAWeek": errOf(r.Refusals(ctx, inspect.RefusalQuery{Since: noon, Until: noon.Add(7*24*time.Hour + 1)})),
		"SinceEver":       errOf(r.Refusals(ctx, inspect.RefusalQuery{Until: noon})),
		"TwoWeeks":        errOf(r.RefusalsByLimit(ctx, []string{"logins"}, nil, noon, noon.Add(14*24*time.Hour))),
	} {
		require.ErrorIs(t, err, inspect.ErrInvalid, name)
	}
	for _, config := range []refusals.TopConfig{{By: "name"}, {Most: -1}, {Most: 1001}} {
		require.ErrorIs(t, errOf(r.TopRefused(ctx, config)), ratelimit.ErrInvalidRequest)
	}
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

func TestLifeOfAReservation(t *testing.T) {
	t.Parallel()
	now := time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)
	before, after := now.Add(-time.Minute), now.Add(time.Minute)
	for want, r := range map[string]inspect.Reservation{
		"waiting until 12:01": {State: "open", ReadyAt: after},
		"ready since 11:59":   {State: "open", ReadyAt: before, StaleAt: after},
		"turn lost 12:00":     {State: "open", ReadyAt: before, StaleAt: now},
		"started 11:59":       {State: "open", ReadyAt: before, StaleAt: now, StartedAt: before},
		"settled 00:00":       {State: "settled", ReadyAt: before, StartedAt: before},
	} {
		stage, at := r.Life(now)
		require.Equal(t, want, stage+at.Format(" 15:04"))
	}
}

func TestDecidedBy(t *testing.T) {
	t.Parallel()
	for rule, want := range map[string]string{"": "the code", "calls": "rule", "calls, plan pro": "plan pro", "calls, override": "override", "x": ""} {
		require.Equal(t, want, inspect.DecidedBy("calls", rule, "the code"))
	}
}

// TestViews promises that buckets of a known limit have their levels, and other buckets only the stored values.
func TestViews(t *testing.T) {
	t.Parallel()
	noon := time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)
	limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{AsOf: func() time.Time { return noon }})
	require.NoError(t, err)
	calls := ratelimit.Define("calls", ratelimit.TokenBucket{Rate: 10, Period: time.Hour, Capacity: 20})
	_, err = limiter.Reserve(t.Context(), calls.For("ada").Cost(30))
	require.NoError(t, err)
	bucketOf := func(limit string) inspect.Bucket {
		return inspect.Bucket{Limit: limit, Key: "ada", Rows: []inspect.Row{{Tokens: -4, At: noon}, {Shard: 1, Tokens: -6, At: noon.Add(-time.Hour)}}}
	}
	views, err := inspect.Views(t.Context(), limiter, []inspect.Bucket{bucketOf("calls"), bucketOf("unknown")}, func(b inspect.Bucket) (ratelimit.Limit, []string) {
		if b.Limit == "calls" {
			return calls, nil
		}
		return ratelimit.Limit{}, nil
	}, nil)
	require.NoError(t, err)
	for i, v := range views {
		require.Equal(t, -10.0, v.Stored)
		require.Equal(t, noon, v.Changed)
		require.Equal(t, 10.0, v.Owed(), i)
	}
	require.Nil(t, views[1].Level)
	level := views[0].Level
	require.Equal(t, []any{-10.0, 20.0, 0.0, "10 per hour, capacity 20"}, []any{level.Tokens, level.Capacity, level.Percent(), level.Words()})
	require.Equal(t, []time.Time{noon.Add(time.Hour), noon.Add(3 * time.Hour)}, []time.Time{level.FreeAt, level.FullAt})
	text, err := json.Marshal(views[0])
	require.NoError(t, err)
	require.JSONEq(t, `{"limit":"calls","key":"ada","at":"2030-01-01T12:00:00Z","tokens":-10,"capacity":20,
		"policy":{"kind":"token bucket","rate":10,"period":"1h","capacity":20},"full_at":"2030-01-01T15:00:00Z","free_at":"2030-01-01T13:00:00Z",
		"changed":"2030-01-01T12:00:00Z","rows":[{"shard":0,"tokens":-4,"at":"2030-01-01T12:00:00Z"},{"shard":1,"tokens":-6,"at":"2030-01-01T11:00:00Z"}]}`, string(text))
	_, err = inspect.Views(t.Context(), limiter, []inspect.Bucket{{Limit: "calls", Key: "\xff"}}, func(inspect.Bucket) (ratelimit.Limit, []string) {
		return calls, nil
	}, nil)
	require.ErrorIs(t, err, ratelimit.ErrInvalidKey)
}
