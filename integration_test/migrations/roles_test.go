package migrations_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/refusals"
	"github.com/pgratelimit/pgratelimit/rules"
)

var (
	logins = ratelimit.Define("logins", ratelimit.PerMinute(10))
	words  = ratelimit.Define("words", ratelimit.FixedWindow{Rate: 100, Period: time.Hour})
	spread = ratelimit.Define("spread", ratelimit.TokenBucket{Rate: 80, Period: time.Minute, Shards: 4})
)

func newLimiter(t *testing.T, pool *pgxpool.Pool, config ratelimit.Config) *ratelimit.Limiter {
	t.Helper()
	config.Timeout = world.Patient
	limiter, err := ratelimit.New(pool, config)
	require.NoError(t, err)
	return limiter
}

func newStore(t *testing.T, pool *pgxpool.Pool) *rules.Store {
	t.Helper()
	store, err := rules.NewStore(pool, rules.StoreConfig{})
	require.NoError(t, err)
	return store
}

// refuse returns a counter on pool that knows of one refusal.
func refuse(t *testing.T, pool *pgxpool.Pool) *refusals.Counter {
	t.Helper()
	counter, err := refusals.New(pool, refusals.Config{Keys: true})
	require.NoError(t, err)
	counter.Refused(t.Context(), ratelimit.Refusal{Limit: "logins", Key: "ada", Cost: 1, At: time.Now()})
	return counter
}

// writeRefusals makes the counter write its counts.
func writeRefusals(ctx context.Context, counter *refusals.Counter) error {
	ended, end := context.WithCancel(ctx)
	end()
	return counter.Run(ended)
}

func TestTheApplicationDoesItsWorkAndNothingElse(t *testing.T) {
	t.Parallel()
	c := newGrantedCrew(t, "ratelimit")
	pool, ctx := c.as(t, c.roles.Application), t.Context()

	t.Run("TakesReservesAndPrunes", func(t *testing.T) { // not parallel: one story
		var clock atomic.Pointer[time.Time]
		at := func(now time.Time) { clock.Store(&now) }
		noon := time.Date(2026, time.March, 2, 12, 0, 0, 0, time.UTC)
		at(noon)
		limiter := newLimiter(t, pool, ratelimit.Config{AsOf: func() time.Time { return *clock.Load() }, ExpireAfter: time.Hour, ReleaseExpired: true})
		several := []ratelimit.Request{logins.For("ada"), words.For("ada"), spread.For("ada")}
		reserve := func() string {
			r, err := limiter.Reserve(ctx, several...)
			require.NoError(t, err)
			return r.ID
		}
		for name, err := range map[string]error{
			"Take":        did(limiter.Take(ctx, logins.For("ada"))),
			"TakeSeveral": did(limiter.Take(ctx, several...)),
			"TakeAll":     did(limiter.Take(ctx, spread.For("bob").Cost(80))),
			"Check":       did(limiter.Check(ctx, several...)),
			"Value":       did(limiter.Value(ctx, several[0])),
			"Reset":       limiter.Reset(ctx, several...),
			"Credit":      limiter.Credit(ctx, several...),
			"CreditTaken": limiter.CreditTaken(ctx, noon, several...),
			"Charge":      limiter.Charge(ctx, several...),
			"Settle":      limiter.Settle(ctx, reserve(), logins.For("ada").Cost(2)),
			"Cancel":      limiter.Cancel(ctx, reserve()),
			"Start":       did(limiter.Start(ctx, reserve())),
			"Started":     did(limiter.Started(ctx, reserve())),
			"Renew":       did(limiter.Renew(ctx, reserve())),
			"InTx": limiter.InTx(ctx, func(tx pgx.Tx) error {
				bound := limiter.WithTx(tx)
				if err := bound.Require(ctx, several...); err != nil {
					return err
				}
				r, err := bound.Reserve(ctx, several...)
				if err != nil {
					return err
				}
				return bound.Cancel(ctx, r.ID)
			}),
		} {
			require.NoError(t, err, name)
		}
		reserve()
		at(noon.Add(30 * ratelimit.Day))
		ended, err := limiter.Expire(ctx)
		require.NoError(t, err)
		require.Positive(t, ended)
		at(noon.Add(60 * ratelimit.Day))
		pruned, err := limiter.Prune(ctx, logins, words, spread)
		require.NoError(t, err)
		require.Positive(t, pruned)
	})

	t.Run("UsesEveryKind", func(t *testing.T) { // not parallel: one story
		upstream := ratelimit.Define("upstream", ratelimit.Adaptive{Contract: ratelimit.PerSecond(100), Apply: true})
		problems := make(failures, 100)
		limiter := newLimiter(t, pool, ratelimit.Config{Observer: problems})
		for _, policy := range []ratelimit.Policy{
			ratelimit.SlidingWindow{Rate: 100, Period: time.Hour},
			ratelimit.CalendarWindow{Rate: 100, Resets: ratelimit.Monthly, Zone: "Europe/Berlin"},
			ratelimit.Adaptive{Contract: ratelimit.CalendarWindow{Rate: 100, Resets: ratelimit.Daily}, Apply: true},
			upstream.Policy(),
		} {
			request := ratelimit.Define("kind", policy).For(fmt.Sprintf("%T", policy))
			_, err := limiter.Take(ctx, request)
			require.NoError(t, err, "%v", policy)
			if _, slides := policy.(ratelimit.SlidingWindow); slides {
				continue
			}
			r, err := limiter.Reserve(ctx, request.Cost(2))
			require.NoError(t, err, "%v", policy)
			require.NoError(t, limiter.Settle(ctx, r.ID, request))
		}
		lease, err := limiter.Acquire(ctx, ratelimit.Define("jobs", ratelimit.Concurrency{Most: 2}).For("ada"))
		require.NoError(t, err)
		_, err = limiter.RenewLease(ctx, lease.ID)
		require.NoError(t, err)
		require.NoError(t, limiter.Release(ctx, lease.ID))
		require.NoError(t, limiter.Report(ctx, upstream.For("ada"), ratelimit.Outcome{Throttled: true, RetryAfter: time.Millisecond}))
		require.Eventually(t, func() bool {
			_, err := limiter.Check(ctx, upstream.For("ada")) // which has the report written
			require.NoError(t, err)
			return count(t, pool, "SELECT count(*) FROM ratelimit.prices WHERE name = 'upstream'") == 1
		}, world.Patient, time.Millisecond)
		require.NoError(t, limiter.Close(ctx))
		require.Empty(t, problems)
	})

	t.Run("HearsOfRules", func(t *testing.T) { // not parallel: one story
		set, err := rules.NewSet(pool, rules.Config{Poll: world.Patient}) // so that it is listening that tells
		require.NoError(t, err)
		running, stop := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() { done <- set.Run(running) }()
		require.Eventually(t, func() bool { return set.Age() < world.Patient }, world.Patient, time.Millisecond)
		applied, err := newStore(t, c.as(t, c.roles.Operator)).Put(ctx, rules.Edit{Author: "ana", Reason: "a test"},
			rules.Rule{Limit: "logins", Policy: ratelimit.PerMinute(20)})
		require.NoError(t, err)
		require.Eventually(t, func() bool { return set.Version() == applied.Version }, world.Patient, time.Millisecond)
		stop()
		require.ErrorIs(t, <-done, context.Canceled)
	})

	t.Run("WritesRefusals", func(t *testing.T) { // not parallel: one story
		counter := refuse(t, pool)
		require.NoError(t, writeRefusals(ctx, counter))
		top, err := refusals.Top(ctx, pool, "", refusals.TopConfig{})
		require.NoError(t, err)
		require.Len(t, top, 1)
		deleted, err := counter.Prune(ctx, time.Now().Add(ratelimit.Day))
		require.NoError(t, err)
		require.Positive(t, deleted)
	})

	t.Run("ChangesNoRule", func(t *testing.T) { // not parallel: one story
		_, err := newStore(t, pool).Pause(ctx, rules.Edit{Author: "eve", Reason: "none"},
			rules.Pause{Limit: "logins", Until: time.Now().Add(time.Hour)})
		requireNoRight(t, err, "a write")
	})
}

func TestTheOperatorDoesTheirWorkAndNothingElse(t *testing.T) {
	t.Parallel()
	c := newGrantedCrew(t, "ratelimit")
	pool, ctx := c.as(t, c.roles.Operator), t.Context()
	store, limiter, why := newStore(t, pool), newLimiter(t, pool, ratelimit.Config{}), rules.Edit{Author: "ana", Reason: "a test"}
	later, rule := time.Now().Add(time.Hour), rules.Rule{Limit: "logins", Policy: ratelimit.PerMinute(20)}
	for _, step := range []struct {
		name string
		err  error
	}{
		{"Put", did(store.Put(ctx, why, rule))},
		{"PutAgain", did(store.Put(ctx, why, rules.Rule{Limit: "logins", Policy: ratelimit.PerMinute(30)}))},
		{"Override", did(store.Override(ctx, why, rules.Override{Limit: "logins", Key: "ada", Multiplier: 2}))},
		{"OverrideAgain", did(store.Override(ctx, why, rules.Override{Limit: "logins", Key: "ada", Multiplier: 3, Until: later}))},
		{"RemoveOverride", did(store.RemoveOverride(ctx, why, "logins", "ada"))},
		{"Pause", did(store.Pause(ctx, why, rules.Pause{Limit: "logins", Until: later}))},
		{"Resume", did(store.Resume(ctx, why, "logins", ""))},
		{"Tiers", did(store.Apply(ctx, why, rules.Changes{Tiers: &rules.TierSet{Tiers: []rules.Tier{{Limit: "logins"}}}}))},
		{"Delete", did(store.Delete(ctx, why, "logins", ""))},
		{"List", did(store.List(ctx, rules.ListQuery{}))},
		{"History", did(store.History(ctx, rules.HistoryQuery{}))},
		{"Top", did(refusals.Top(ctx, pool, "", refusals.TopConfig{}))},
		{"Charge", limiter.Charge(ctx, logins.For("ada"), spread.For("ada").Cost(80))},
		{"Credit", limiter.Credit(ctx, logins.For("ada"), spread.For("ada"))},
		{"Reset", limiter.Reset(ctx, logins.For("ada"), spread.For("ada"))},
		{"Value", did(limiter.Value(ctx, logins.For("ada")))},
		{"Check", did(limiter.Check(ctx, logins.For("ada"), spread.For("ada")))},
		{"AnotherHashKey", did(pool.Exec(ctx, "DELETE FROM ratelimit.fingerprint"))},
	} {
		require.NoError(t, step.err, step.name)
	}
	_, err := limiter.Reserve(ctx, logins.For("ada"))
	requireNoRight(t, err, "a write")
}

func TestTheReaderReadsAllAndWritesNothing(t *testing.T) {
	t.Parallel()
	c := newGrantedCrew(t, "ratelimit")
	pool, ctx := c.as(t, c.roles.Reader), t.Context()
	limiter := newLimiter(t, pool, ratelimit.Config{})
	application := newLimiter(t, c.as(t, c.roles.Application), ratelimit.Config{})
	require.NoError(t, application.Require(ctx, logins.For("ada")))
	store, counter, why := newStore(t, pool), refuse(t, pool), rules.Edit{Author: "eve", Reason: "none"}
	set, err := rules.NewSet(pool, rules.Config{})
	require.NoError(t, err)
	for name, err := range map[string]error{
		"Value":   did(limiter.Value(ctx, logins.For("ada"))),
		"Check":   did(limiter.Check(ctx, logins.For("ada"), words.For("ada"))),
		"List":    did(store.List(ctx, rules.ListQuery{})),
		"History": did(store.History(ctx, rules.HistoryQuery{})),
		"Load":    set.Load(ctx),
		"Top":     did(refusals.Top(ctx, pool, "", refusals.TopConfig{})),
	} {
		require.NoError(t, err, name)
	}
	requireLatest(t, pool)
	for name, err := range map[string]error{
		"Refusals": writeRefusals(ctx, counter),
		"Take":     limiter.Require(ctx, logins.For("ada")),
		"Reset":    limiter.Reset(ctx, logins.For("ada")),
		"Delete":   did(store.Delete(ctx, why, "logins", "")),
	} {
		requireNoRight(t, err, name)
	}
}

// did returns the error of a call.
func did[T any](_ T, err error) error { return err }

// requireNoRight checks that the server said that the role lacks a right.
func requireNoRight(t *testing.T, err error, what string) {
	t.Helper()
	var answer *pgconn.PgError
	require.ErrorAs(t, err, &answer, what)
	require.Equal(t, "42501", answer.Code, "%s: %s", what, answer.Message)
}

// failures is an Observer that keeps the failures beside the calls.
type failures chan error

func (f failures) Observe(_ context.Context, event ratelimit.Event) {
	if failed, ok := event.(ratelimit.Failed); ok {
		f <- failed.Err
	}
}
