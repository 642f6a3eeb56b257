package integration_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestSlotsOfALimitThatIsNotEnforced(t *testing.T) {
	t.Parallel()
	jobs, other := daylong("jobs", 1), daylong("other", 5)
	t.Run("Shadow", func(t *testing.T) {
		t.Parallel()
		r := setupRuled(t, ratelimit.Config{RefusalCache: 100})
		r.rule(t, jobs, "", ratelimit.Era{Mode: ratelimit.Shadow})
		first := acquire(t, r.Limiter, jobs.For("ada"))
		second := acquire(t, r.Limiter, jobs.For("ada"))
		require.False(t, second.States[0].Allowed, "what would be decided is told")
		require.Equal(t, second.At.UnixMicro(), second.Fence)
		require.Equal(t, second.At.Add(24*time.Hour), second.Until)
		renewed, err := r.RenewLease(t.Context(), second.ID)
		require.NoError(t, err)
		require.Equal(t, second.Until, renewed.Until)
		require.NoError(t, r.Release(t.Context(), second.ID), "nothing is held")
		require.NoError(t, r.Release(t.Context(), second.ID))
		requireFree(t, r.Limiter, 0, jobs.For("ada"))
		require.NoError(t, r.Release(t.Context(), first.ID))
		requireFree(t, r.Limiter, 1, jobs.For("ada"))
		acquire(t, r.Limiter, jobs.For("ada"))
		both := acquire(t, r.Limiter, jobs.For("ada"), other.For("ada"))
		requireFree(t, r.Limiter, 4, other.For("ada"))
		require.NoError(t, r.Release(t.Context(), both.ID))
		requireFree(t, r.Limiter, 5, other.For("ada"))
		requireFree(t, r.Limiter, 0, jobs.For("ada"))
	})
	t.Run("Off", func(t *testing.T) {
		t.Parallel()
		r := setupRuled(t, ratelimit.Config{})
		r.rule(t, jobs, "", ratelimit.Era{Mode: ratelimit.Off})
		for range 2 {
			lease := acquire(t, r.Limiter, jobs.For("ada"))
			require.NotZero(t, lease.Fence)
			require.NoError(t, r.Release(t.Context(), lease.ID))
		}
		require.NoError(t, r.InTx(t.Context(), func(tx pgx.Tx) error {
			lease := acquire(t, r.WithTx(tx), jobs.For("ada"), other.For("ada"))
			return r.WithTx(tx).Release(t.Context(), lease.ID)
		}))
		require.Zero(t, (&bundle{pool: r.pool}).count(t, `SELECT count(*) FROM ratelimit.buckets WHERE name = 'jobs'`))
	})
	t.Run("Paused", func(t *testing.T) {
		t.Parallel()
		r := setupRuled(t, ratelimit.Config{})
		lease := acquire(t, r.Limiter, jobs.For("ada"))
		r.pausedRule(t, jobs, "", time.Minute)
		d := refused(t, r.Limiter, jobs.For("bob"), other.For("bob"))
		require.Equal(t, time.Minute, d.RetryAfter)
		require.Equal(t, "the provider is down", d.States[0].PauseReason)
		_, err := r.RenewLease(t.Context(), lease.ID)
		require.NoError(t, err, "who holds a slot goes on")
		require.NoError(t, r.Release(t.Context(), lease.ID))
		r.at(time.Minute)
		acquire(t, r.Limiter, jobs.For("bob"), other.For("bob"))
	})
}

// A rule that changes a limit on concurrency keeps the leases, unless it fills the buckets. Leases are renewed by the rule of their
// key's plan.
func TestSlotsOfALimitWhoseRuleChanges(t *testing.T) {
	t.Parallel()
	jobs := daylong("jobs", 4)
	lowered := ratelimit.Concurrency{Most: 1, Lease: time.Minute}
	change := func(t *testing.T, policy ratelimit.Policy, how ratelimit.OnChange) *ruled {
		t.Helper()
		r := setupRuled(t, ratelimit.Config{})
		r.rule(t, jobs, "pro", ratelimit.Era{}, ratelimit.Era{From: clockNoon.Add(time.Second), Policy: policy, OnChange: how})
		return r
	}
	request := jobs.For("ada").Plan("pro")
	for _, how := range []ratelimit.OnChange{ratelimit.KeepTokens, ratelimit.ScaleTokens, ratelimit.AddTokens} {
		t.Run(string(how), func(t *testing.T) {
			t.Parallel()
			r := change(t, lowered, how)
			first, second := acquire(t, r.Limiter, request), acquire(t, r.Limiter, request.Cost(2))
			r.at(time.Second)
			requireFree(t, r.Limiter, -2, request)
			refused(t, r.Limiter, request)
			renewed, err := r.RenewLease(t.Context(), second.ID)
			require.NoError(t, err)
			require.Equal(t, second.Until, renewed.Until, "it ends no earlier than it would have")
			require.NoError(t, r.Release(t.Context(), second.ID))
			refused(t, r.Limiter, request)
			require.NoError(t, r.Release(t.Context(), first.ID))
			lease := acquire(t, r.Limiter, request)
			require.Equal(t, time.Minute, lease.Until.Sub(lease.At))
			r.at(31 * time.Second)
			renewed, err = r.RenewLease(t.Context(), lease.ID)
			require.NoError(t, err)
			require.Equal(t, lease.Until.Add(30*time.Second), renewed.Until)
			require.Less(t, second.Fence, lease.Fence)
		})
	}
	t.Run("Reset", func(t *testing.T) {
		t.Parallel()
		r := change(t, lowered, ratelimit.ResetTokens)
		lease := acquire(t, r.Limiter, request)
		r.at(time.Second)
		_, err := r.RenewLease(t.Context(), lease.ID)
		require.ErrorIs(t, err, ratelimit.ErrLeaseLost)
		require.Greater(t, acquire(t, r.Limiter, request).Fence, lease.Fence)
	})
	t.Run("ToTokensAndBack", func(t *testing.T) {
		t.Parallel()
		r := setupRuled(t, ratelimit.Config{})
		r.rule(t, jobs, "pro", ratelimit.Era{}, ratelimit.Era{From: clockNoon.Add(time.Second), Policy: ratelimit.TokenBucket{Rate: 8, Period: century}},
			ratelimit.Era{From: clockNoon.Add(2 * time.Second), Policy: lowered})
		lease := acquire(t, r.Limiter, request)
		r.at(time.Second)
		_, err := r.Acquire(t.Context(), request)
		require.ErrorIs(t, err, ratelimit.ErrInvalidRequest, "the limit has tokens and no slots now")
		require.ErrorIs(t, r.Release(t.Context(), lease.ID), ratelimit.ErrLeaseLost)
		r.at(2 * time.Second)
		again := acquire(t, r.Limiter, request)
		require.Greater(t, again.Fence, lease.Fence)
		refused(t, r.Limiter, request)
	})
}

// TestSlotsUnderTwoDefinitions has programs of two versions use one bucket.
func TestSlotsUnderTwoDefinitions(t *testing.T) {
	t.Parallel()
	b := setup(t)
	older, newer := b.with(t, ratelimit.Config{}), b.with(t, ratelimit.Config{})
	five, two := daylong("jobs", 5), ratelimit.Define("jobs", ratelimit.Concurrency{Most: 2, Lease: time.Hour})
	ids := make([]string, 4)
	for i := range ids {
		ids[i] = acquire(t, older, five.For("ada")).ID
	}
	requireFree(t, newer, -2, two.For("ada"))
	for i, id := range ids[:3] {
		refused(t, newer, two.For("ada"))
		require.NoError(t, newer.Release(t.Context(), id))
		requireFree(t, older, float64(2+i), five.For("ada"))
	}
	lease := acquire(t, newer, two.For("ada"))
	require.Equal(t, time.Hour, lease.Until.Sub(lease.At))
	refused(t, newer, two.For("ada"))
	acquire(t, older, five.For("ada").Cost(3))
	renewed, err := older.RenewLease(t.Context(), lease.ID)
	require.NoError(t, err)
	require.Equal(t, 24*time.Hour, renewed.Until.Sub(renewed.At), "by the policy that this Limiter knows")
	stranger := b.with(t, ratelimit.Config{})
	again := acquire(t, stranger, daylong("others", 1).For("ada"))
	_, err = stranger.RenewLease(t.Context(), renewed.ID)
	require.NoError(t, err)
	require.NoError(t, b.with(t, ratelimit.Config{}).Release(t.Context(), again.ID), "a Limiter that knows no policy")

	tokens := ratelimit.Define("jobs", hoard(9)) // a version under which the limit is of another kind
	require.NoError(t, newer.Charge(t.Context(), tokens.For("ada").Cost(3)))
	v, err := older.Value(t.Context(), five.For("ada"))
	require.NoError(t, err)
	require.InDelta(t, 0, v.Tokens, 0, "it leaves the leases as they are")
	require.Greater(t, acquire(t, older, daylong("jobs", 20).For("ada")).Fence, lease.Fence)
}

// TestFencesGoOnWhenARowWasPruned has Prune delete a row, but not while one of its leases is held, or for a minute after.
func TestFencesGoOnWhenARowWasPruned(t *testing.T) {
	t.Parallel()
	r := setupRuled(t, ratelimit.Config{})
	jobs := ratelimit.Define("jobs", ratelimit.Concurrency{Most: 2, Lease: time.Hour})
	lease := acquire(t, r.Limiter, jobs.For("ada"))
	given := acquire(t, r.Limiter, jobs.For("bob"))
	require.NoError(t, r.Release(t.Context(), given.ID))
	longer := acquire(t, setupLike(t, r), daylong("jobs", 2).For("eve")) // by a program of another version
	prune := func(at time.Duration) int64 {
		r.at(at)
		n, err := r.Prune(t.Context(), jobs)
		require.NoError(t, err)
		return n
	}
	require.Zero(t, prune(time.Minute-time.Microsecond))
	require.EqualValues(t, 1, prune(time.Minute+time.Microsecond), "that of the lease that was given back")
	require.Zero(t, prune(time.Hour+time.Minute-time.Microsecond))
	require.EqualValues(t, 1, prune(time.Hour+time.Minute))
	require.Greater(t, acquire(t, r.Limiter, jobs.For("ada")).Fence, lease.Fence)
	require.Greater(t, acquire(t, r.Limiter, jobs.For("bob")).Fence, given.Fence)
	_, err := r.RenewLease(t.Context(), longer.ID)
	require.NoError(t, err, "it is there, and held")
	require.ErrorIs(t, r.Release(t.Context(), lease.ID), ratelimit.ErrLeaseLost)
}

// setupLike returns another Limiter on the tables and the clock of r.
func setupLike(t *testing.T, r *ruled) *ratelimit.Limiter {
	t.Helper()
	l, err := ratelimit.New(r.pool, ratelimit.Config{AsOf: func() time.Time { return *r.now.Load() }})
	require.NoError(t, err)
	return l
}

// A refusal is not remembered, as slots are given back at any time.
func TestARefusedSlotIsAskedForAgain(t *testing.T) {
	t.Parallel()
	b := setup(t)
	caching, elsewhere := b.with(t, ratelimit.Config{RefusalCache: 1000}), b.with(t, ratelimit.Config{})
	job, tokens := daylong("jobs", 1).For("ada"), ratelimit.Define("tokens", hoard(9)).For("ada")
	for range 3 {
		lease := acquire(t, elsewhere, job)
		refused(t, caching, job)
		refused(t, caching, job, tokens)
		require.NoError(t, elsewhere.Release(t.Context(), lease.ID))
		require.NoError(t, caching.Release(t.Context(), acquire(t, caching, job, tokens).ID))
	}
}

// leaseEvents is an Observer that keeps its events.
type leaseEvents struct {
	mu     sync.Mutex
	events []ratelimit.Event
}

func (o *leaseEvents) Observe(_ context.Context, event ratelimit.Event) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.events = append(o.events, event)
}

func TestLeasesAreToldOf(t *testing.T) {
	t.Parallel()
	b := setup(t)
	heard := &leaseEvents{}
	var told []ratelimit.Refusal
	l := b.with(t, ratelimit.Config{Observer: heard, Refused: func(_ context.Context, r ratelimit.Refusal) { told = append(told, r) }})
	job, tokens := daylong("jobs", 2), ratelimit.Define("tokens", hoard(9))
	lease := acquire(t, l, job.For("ada").Cost(2), tokens.For("ada"))
	refused(t, l, job.For("ada"), tokens.For("ada"))
	require.Len(t, told, 1)
	require.Equal(t, "jobs", told[0].Limit)
	_, err := l.RenewLease(t.Context(), lease.ID)
	require.NoError(t, err)
	require.NoError(t, l.InTx(t.Context(), func(tx pgx.Tx) error { return l.WithTx(tx).Release(t.Context(), lease.ID) }))
	require.ErrorIs(t, l.Release(t.Context(), lease.ID), ratelimit.ErrLeaseLost)
	tx := b.begin(t, pgx.ReadCommitted)
	require.ErrorIs(t, l.WithTx(tx).Release(t.Context(), lease.ID), ratelimit.ErrLeaseLost)

	var verbs []string
	var leased []ratelimit.Event
	for _, event := range heard.events {
		switch e := event.(type) {
		case ratelimit.Decided:
			verbs = append(verbs, e.Verb)
			require.Len(t, e.Decision.States, 2)
		case ratelimit.Leased:
			leased = append(leased, e)
		case ratelimit.Failed:
			require.NoError(t, e.Err)
		}
	}
	require.Equal(t, []string{"acquire", "acquire"}, verbs)
	require.Equal(t, []ratelimit.Event{
		ratelimit.Leased{Verb: "renew_lease", Limit: "jobs", Slots: 2},
		ratelimit.Leased{Verb: "release", Limit: "jobs", Slots: 2},
		ratelimit.Leased{Verb: "release", Limit: "jobs", Slots: 2, Lost: true},
		ratelimit.Leased{Verb: "release", Limit: "jobs", Slots: 2, Lost: true, Pending: true},
	}, slices.Clip(leased))
}
