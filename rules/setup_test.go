package rules_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
	"github.com/pgratelimit/pgratelimit/rules"
)

// deadline only ends a test that hangs.
const deadline = 2 * time.Minute

// messages holds 10 tokens in the code.
var messages = ratelimit.Define("messages", ratelimit.PerMinute(10))

// why is the author of the changes in the tests, with a reason.
var why = rules.Edit{Author: "ana", Reason: "a test"}

// fixture is a database with all tables, and what works on it.
type fixture struct {
	pool   *pgxpool.Pool
	store  *rules.Store
	set    *rules.Set
	events *events
}

func setup(t testing.TB) *fixture {
	t.Helper()
	return setupOn(t, postgrestest.New(t))
}

func setupOn(t testing.TB, pool *pgxpool.Pool) *fixture {
	t.Helper()
	f := &fixture{pool: pool, events: &events{}}
	var err error
	f.store, err = rules.NewStore(pool, rules.StoreConfig{})
	require.NoError(t, err)
	f.set, err = rules.NewSet(pool, rules.Config{Observer: f.events})
	require.NoError(t, err)
	return f
}

// now returns what time it is for the database.
func (f *fixture) now(t testing.TB) (now time.Time) {
	t.Helper()
	require.NoError(t, f.pool.QueryRow(t.Context(), `SELECT clock_timestamp()`).Scan(&now))
	return now
}

// events remembers what a Set told.
type events struct {
	mu      sync.Mutex
	told    []event.RulesLoaded
	checked []event.RulesChecked
}

func (e *events) Observe(_ context.Context, told event.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch told := told.(type) {
	case event.RulesLoaded:
		e.told = append(e.told, told)
	case event.RulesChecked:
		e.checked = append(e.checked, told)
	}
}

func (e *events) last(t testing.TB) event.RulesLoaded {
	t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	require.NotEmpty(t, e.told)
	return e.told[len(e.told)-1]
}

func (e *events) count() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.told)
}

// perMinute is a rule of n tokens a minute.
func perMinute(limit, plan string, n float64) rules.Rule {
	return rules.Rule{Limit: limit, Plan: plan, Policy: ratelimit.TokenBucket{Rate: n, Period: time.Minute}}
}

func (f *fixture) load(t testing.TB) {
	t.Helper()
	require.NoError(t, f.set.Load(t.Context()))
}

func (f *fixture) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	_, err := f.pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// state writes a rule of the limit "messages" by hand.
func (f *fixture) state(t testing.TB, version int, plan, says string, from time.Time) {
	t.Helper()
	f.exec(t, `INSERT INTO ratelimit.rules (version, of, name, plan, says, from_us, author, reason) VALUES ($1, 'rule', 'messages', $2, $3, $4, 'ana', 'x')`,
		version, plan, says, from.UnixMicro())
}

// at returns a limiter that decides by the set, on a clock that stands still.
func (f *fixture) at(t testing.TB, now time.Time) *ratelimit.Limiter {
	t.Helper()
	limiter, err := ratelimit.New(f.pool, ratelimit.Config{Policies: f.set, AsOf: func() time.Time { return now }})
	require.NoError(t, err)
	return limiter
}

// capacity returns the capacity that a request would be decided under at an instant.
func (f *fixture) capacity(t testing.TB, at time.Time, request ratelimit.Request) float64 {
	t.Helper()
	return f.at(t, at).Resolve(request).Capacity()
}

// made returns a function that requires a change of a Store to succeed, and returns where it holds from.
func made(t testing.TB) func(rules.Applied, error) rules.Applied {
	return func(applied rules.Applied, err error) rules.Applied {
		t.Helper()
		require.NoError(t, err)
		return applied
	}
}

// errorOf returns the error of a call.
func errorOf[T any](_ T, err error) error { return err }

// list returns a part of the tables.
func (f *fixture) list(t testing.TB, query rules.ListQuery) rules.Listing {
	t.Helper()
	list, err := f.store.List(t.Context(), query)
	require.NoError(t, err)
	return list
}

// history returns entries of the history.
func (f *fixture) history(t testing.TB, query rules.HistoryQuery) []rules.Statement {
	t.Helper()
	entries, err := f.store.History(t.Context(), query)
	require.NoError(t, err)
	return entries
}
