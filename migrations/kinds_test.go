package migrations_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// kindsVersion is the migration with which rules learn the kinds besides token bucket and fixed window.
const kindsVersion = 9

// firstKinds is the first migration of the kinds.
const firstKinds = 8

// TestKindsOfRules promises that rows from before the migration stay as they are, and what is undone with it: rules of kinds
// that programs from before cannot read, which programs then hear of.
func TestKindsOfRules(t *testing.T) {
	t.Parallel()
	pool := postgrestest.NewEmpty(t)
	provider, err := migrations.NewProvider(pool, migrations.DefaultSchema)
	require.NoError(t, err)
	_, err = provider.UpTo(t.Context(), kindsVersion-1)
	require.NoError(t, err)
	exec := func(sql string) {
		_, err := pool.Exec(t.Context(), sql)
		require.NoError(t, err, sql)
	}
	names := func() []string {
		return texts(t, pool, `SELECT name || ' ' || kind FROM ratelimit.rules UNION ALL
			SELECT name || ' ' || key || ' ' || coalesce(kind, '') FROM ratelimit.overrides ORDER BY 1`)
	}
	exec(`INSERT INTO ratelimit.rules_version (version) VALUES (4)`)
	exec(`INSERT INTO ratelimit.rules (name, kind, rate, period_us, start_us) VALUES ('a', 'fixed window', 1, 1, 5), ('b', 'token bucket', 1, 1, NULL)`)
	exec(`INSERT INTO ratelimit.overrides (name, key, multiplier, author, reason) VALUES ('a', 'k', 2, 'ana', 'x')`)
	before := names()
	_, err = provider.UpTo(t.Context(), kindsVersion)
	require.NoError(t, err)
	require.Equal(t, before, names())
	exec(`INSERT INTO ratelimit.rules (name, kind, rate, period_us, slices) VALUES ('c', 'sliding window', 1, 60, 60)`)
	exec(`INSERT INTO ratelimit.rules (name, kind, rate, period_us, resets, zone) VALUES ('d', 'calendar window', 1, 86400000000, 'day', 'UTC')`)
	exec(`INSERT INTO ratelimit.overrides (name, key, kind, rate, period_us, shards, mode, author, reason) VALUES ('a', 'l', 'concurrency', 3, 1000, 1, 'on', 'ana', 'x')`)
	exec(`UPDATE ratelimit.rules SET floor = 0.1, growth = 0.1, epoch_us = 1000000, apply = true WHERE name = 'b'`)
	_, err = provider.DownTo(t.Context(), kindsVersion-1)
	require.NoError(t, err)
	require.Equal(t, before, names())
	require.Equal(t, []string{"5"}, texts(t, pool, `SELECT version::text FROM ratelimit.rules_version`), "programs load what is left")
	_, err = provider.UpTo(t.Context(), kindsVersion)
	require.NoError(t, err)
}

// TestDownWithRowsOfEachKind promises what undoing the migrations of the kinds loses: slots that are held, when tokens were taken
// in a window, what is known of upstreams, and the price and the calendar of reservations. What buckets hold stays, and
// with the migrations again programs go on.
func TestDownWithRowsOfEachKind(t *testing.T) {
	t.Parallel()
	pool, ctx := postgrestest.New(t), t.Context()
	provider, err := migrations.NewProvider(pool, migrations.DefaultSchema)
	require.NoError(t, err)
	clock := time.Date(2026, time.March, 2, 12, 0, 0, 0, time.UTC)
	limiter, err := ratelimit.New(pool, ratelimit.Config{AsOf: func() time.Time { return clock }, Timeout: 2 * time.Minute})
	require.NoError(t, err)
	bucket := ratelimit.Define("bucket", ratelimit.PerDay(100)).For("ada")
	sliding := ratelimit.Define("sliding", ratelimit.SlidingWindow{Rate: 100, Period: time.Hour}).For("ada")
	monthly := ratelimit.Define("monthly", ratelimit.CalendarWindow{Rate: 100, Resets: ratelimit.Monthly}).For("ada")
	upstream := ratelimit.Define("upstream", ratelimit.Adaptive{Contract: ratelimit.PerDay(100), Apply: true}).For("ada")
	jobs := ratelimit.Define("jobs", ratelimit.Concurrency{Most: 100}).For("ada")
	all := []ratelimit.Request{bucket, sliding, monthly, upstream}
	_, err = limiter.Take(ctx, bucket.Cost(10), sliding.Cost(10), monthly.Cost(10), upstream.Cost(5).Price(2))
	require.NoError(t, err)
	r, err := limiter.Reserve(ctx, monthly.Cost(10), upstream.Cost(5).Price(2))
	require.NoError(t, err)
	lease, err := limiter.Acquire(ctx, jobs.Cost(10))
	require.NoError(t, err)
	_, err = pool.Exec(ctx, `INSERT INTO ratelimit.prices VALUES ('upstream', 'bob', 0, 0, 0, 0, 0, 0, 0.5, true, 0)`)
	require.NoError(t, err)
	left := func() (tokens []float64) {
		for _, request := range append(all, jobs) {
			v, err := limiter.Value(ctx, request)
			require.NoError(t, err)
			tokens = append(tokens, v.Tokens)
		}
		return tokens
	}
	require.Equal(t, []float64{90, 90, 80, 80, 90}, left())
	stored := func() []string {
		return texts(t, pool, `SELECT name || ' ' || value FROM ratelimit.buckets UNION ALL SELECT state FROM ratelimit.reservations ORDER BY 1`)
	}
	before := stored()

	_, err = provider.DownTo(ctx, firstKinds-1)
	require.NoError(t, err)
	require.Equal(t, before, stored(), "what buckets hold, and reservations, stay")
	require.NotContains(t, tables(t, pool), "ratelimit.prices")
	_, err = limiter.Take(ctx, sliding)
	require.ErrorIs(t, err, ratelimit.ErrNotMigrated)
	require.ErrorContains(t, err, "run migrations.Up")

	_, err = provider.Up(ctx)
	require.NoError(t, err)
	require.Equal(t, before, stored())
	require.Equal(t, []float64{90, 90, 80, 80}, left()[:4])
	require.Equal(t, 100.0, left()[4], "no lease is known any more")
	require.ErrorIs(t, limiter.Release(ctx, lease.ID), ratelimit.ErrLeaseLost)
	require.NoError(t, limiter.Settle(ctx, r.ID, monthly.Cost(1), upstream.Cost(10)))
	require.Equal(t, 80.0, left()[3], "as at a price of 1")
}
