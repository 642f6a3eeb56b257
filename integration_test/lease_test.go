package integration_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// daylong returns a limit on concurrency whose leases outlive any test.
func daylong(name string, most int) ratelimit.Limit {
	return ratelimit.Define(name, ratelimit.Concurrency{Most: most, Lease: 24 * time.Hour})
}

// slots returns a limit on concurrency with a long lease.
func slots(name string, most int) ratelimit.Limit {
	return ratelimit.Define(name, ratelimit.Concurrency{Most: most, Lease: time.Hour})
}

func TestASlotIsHeldUntilItIsGivenBack(t *testing.T) {
	t.Parallel()
	b := setup(t)
	jobs := slots("jobs", 2)
	first, err := b.limiter.Acquire(t.Context(), jobs.For("k"))
	require.NoError(t, err)
	require.True(t, first.Allowed)
	require.Equal(t, time.Hour, first.Until.Sub(first.At))
	second, err := b.limiter.Acquire(t.Context(), jobs.For("k"))
	require.NoError(t, err)
	require.Greater(t, second.Fence, first.Fence)
	refused, err := b.limiter.Acquire(t.Context(), jobs.For("k"))
	require.NoError(t, err)
	require.False(t, refused.Allowed)
	require.Empty(t, refused.ID)
	require.Equal(t, first.Until.Sub(refused.At), refused.RetryAfter, "at the latest when the first lease ends")

	require.NoError(t, b.limiter.Release(t.Context(), first.ID))
	require.ErrorIs(t, b.limiter.Release(t.Context(), first.ID), ratelimit.ErrLeaseLost)
	_, err = b.limiter.RenewLease(t.Context(), first.ID)
	require.ErrorIs(t, err, ratelimit.ErrLeaseLost)
	renewed, err := b.limiter.RenewLease(t.Context(), second.ID)
	require.NoError(t, err)
	require.Equal(t, second.ID, renewed.ID)
	require.Equal(t, second.Fence, renewed.Fence)
	require.Equal(t, time.Hour, renewed.Until.Sub(renewed.At))
	v, err := b.limiter.Value(t.Context(), jobs.For("k"))
	require.NoError(t, err)
	require.Equal(t, 1.0, v.Tokens)
	require.Equal(t, 2.0, v.At(renewed.Until))
	require.Equal(t, 1.0, v.At(renewed.Until.Add(-time.Microsecond)))
	third, err := b.limiter.Acquire(t.Context(), jobs.For("k"))
	require.NoError(t, err)
	require.True(t, third.Allowed)
	require.Greater(t, third.Fence, second.Fence)
}

// The ID of a lease of another schema, or of no bucket here, is a lost lease, and makes no row.
func TestALeaseOfAnotherSchema(t *testing.T) {
	t.Parallel()
	b := setup(t)
	require.NoError(t, migrations.Up(t.Context(), b.pool, migrations.Config{Schema: "another"}))
	foreign := b.with(t, ratelimit.Config{Schema: "another"})
	job := daylong("jobs", 2).For("ada")
	elsewhere, here := acquire(t, foreign, job), acquire(t, b.limiter, job)
	stranger := acquire(t, foreign, daylong("strange", 1).For("bob"))
	for _, id := range []string{elsewhere.ID, stranger.ID} {
		require.ErrorIs(t, b.limiter.Release(t.Context(), id), ratelimit.ErrLeaseLost)
		require.ErrorIs(t, errOf(b.limiter.RenewLease(t.Context(), id)), ratelimit.ErrLeaseLost)
	}
	require.Equal(t, 1, b.count(t, `SELECT count(*) FROM ratelimit.buckets`))
	require.NoError(t, b.limiter.Release(t.Context(), here.ID))
	require.NoError(t, foreign.Release(t.Context(), elsewhere.ID))
}

// A lease ID has the stored key, so that a release needs no secret, and the ID reveals none.
func TestALeaseUnderAHashedKey(t *testing.T) {
	t.Parallel()
	b := setup(t)
	hashing := b.with(t, ratelimit.Config{HashKey: []byte("0123456789abcdef0123456789abcdef")})
	jobs := daylong("jobs", 1)
	lease := acquire(t, hashing, jobs.For("ada@example.org"))
	require.Empty(t, b.rows(t, "ada"))
	require.Less(t, len(lease.ID), 120)
	require.NotContains(t, lease.ID, "=")
	require.NoError(t, b.limiter.Release(t.Context(), lease.ID))
	acquire(t, hashing, jobs.For("ada@example.org"))
}

// If one limit's part of a lease is lost, nothing is renewed, and the other parts are released.
func TestALeaseOfWhichAPartIsLost(t *testing.T) {
	t.Parallel()
	b := setup(t)
	one, two, three := daylong("one", 1).For("ada"), daylong("two", 1).For("ada"), ratelimit.Define("three", ratelimit.Concurrency{Most: 1, Lease: time.Hour}).For("ada")
	for _, inTx := range []bool{false, true} {
		lease := acquire(t, b.limiter, three, two, one)
		require.Equal(t, time.Hour, lease.Until.Sub(lease.At), "that of the shortest")
		renewed, err := b.limiter.RenewLease(t.Context(), lease.ID)
		require.NoError(t, err)
		require.Equal(t, time.Hour, renewed.Until.Sub(renewed.At))
		require.NoError(t, b.limiter.Reset(t.Context(), two))
		held, err := b.limiter.Value(t.Context(), one)
		require.NoError(t, err)
		l := b.limiter
		if inTx {
			l = b.limiter.WithTx(b.begin(t, pgx.ReadCommitted))
		}
		_, err = l.RenewLease(t.Context(), lease.ID)
		require.ErrorIs(t, err, ratelimit.ErrLeaseLost)
		require.ErrorContains(t, err, `"two"`)
		after, err := l.Value(t.Context(), one)
		require.NoError(t, err)
		require.Equal(t, held.At(held.AsOf.Add(24*time.Hour)), after.At(held.AsOf.Add(24*time.Hour)))
		require.ErrorIs(t, l.Release(t.Context(), lease.ID), ratelimit.ErrLeaseLost)
		requireFree(t, l, 1, one)
		requireFree(t, l, 1, three)
	}
}

// acquire acquires free slots.
func acquire(t *testing.T, l *ratelimit.Limiter, requests ...ratelimit.Request) ratelimit.Lease {
	t.Helper()
	lease, err := l.Acquire(t.Context(), requests...)
	require.NoError(t, err)
	require.True(t, lease.Allowed)
	return lease
}

// refused asks for slots that are not free.
func refused(t *testing.T, l *ratelimit.Limiter, requests ...ratelimit.Request) ratelimit.Lease {
	t.Helper()
	lease, err := l.Acquire(t.Context(), requests...)
	require.NoError(t, err)
	require.False(t, lease.Allowed)
	require.Empty(t, lease.ID)
	require.Zero(t, lease.Fence)
	return lease
}

// requireFree checks how many slots are free.
func requireFree(t *testing.T, l *ratelimit.Limiter, slots float64, r ratelimit.Request) {
	t.Helper()
	v, err := l.Value(t.Context(), r)
	require.NoError(t, err)
	require.Equal(t, slots, v.Tokens)
}

var isolationLevels = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

func TestTheTransactionGoesOnAfterARefusal(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(t, `CREATE TABLE public.done (n int)`)
	job := daylong("jobs", 1).For("k")
	lease := acquire(t, b.limiter, job)
	for _, level := range isolationLevels {
		_, err := atonce.Tx(t.Context(), b.db(), level, func(tx pgx.Tx) error {
			l := b.limiter.WithTx(tx)
			refused(t, l, job)
			require.ErrorIs(t, l.Release(t.Context(), acquireAndRelease(t, l)), ratelimit.ErrLeaseLost)
			_, err := l.RenewLease(t.Context(), "L1")
			require.ErrorIs(t, err, ratelimit.ErrInvalidLease)
			_, err = l.Acquire(t.Context(), job.Cost(2))
			require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
			_, err = tx.Exec(t.Context(), `INSERT INTO public.done VALUES (1)`)
			return err
		})
		require.NoError(t, err)
	}
	require.Equal(t, len(isolationLevels), b.count(t, `SELECT count(*) FROM public.done`))
	require.NoError(t, b.limiter.Release(t.Context(), lease.ID))
}

// acquireAndRelease returns the ID of a lease that was given back.
func acquireAndRelease(t *testing.T, l *ratelimit.Limiter) string {
	t.Helper()
	lease := acquire(t, l, daylong("others", 1).For("k"))
	require.NoError(t, l.Release(t.Context(), lease.ID))
	return lease.ID
}

// The ID of a lease that was rolled back differs from the ID of the next lease, also if a clock was ahead. Its fencing tokens are
// not used again.
func TestAnIDOfWhatWasRolledBackReleasesNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, level := range isolationLevels {
		for _, ahead := range []time.Duration{0, time.Microsecond, time.Second, time.Hour, ratelimit.Week} {
			t.Run(fmt.Sprintf("%s/%v", level, ahead), func(t *testing.T) {
				t.Parallel()
				d, job := b.desk(t, ratelimit.Config{}), daylong("jobs", 1).For(t.Name())
				d.at(ahead)
				require.NoError(t, d.limiter.Release(t.Context(), acquire(t, d.limiter, job).ID))
				d.at(0)
				tx := b.begin(t, level)
				undone := acquire(t, d.limiter.WithTx(tx), job)
				require.NoError(t, tx.Rollback(t.Context()))
				for _, later := range []time.Duration{time.Microsecond, time.Millisecond, 10 * time.Millisecond, time.Minute} {
					d.at(later)
					lease := acquire(t, d.limiter, job)
					require.ErrorIs(t, d.limiter.Release(t.Context(), undone.ID), ratelimit.ErrLeaseLost)
					_, err := d.limiter.RenewLease(t.Context(), undone.ID)
					require.ErrorIs(t, err, ratelimit.ErrLeaseLost)
					requireFree(t, d.limiter, 0, job)
					require.NoError(t, d.limiter.Release(t.Context(), lease.ID))
				}
			})
		}
	}
}

// holdRow locks the row of a bucket until release is called.
func (b *bundle) holdRow(t *testing.T, name, key string) (release func()) {
	t.Helper()
	tx := b.begin(t, pgx.ReadCommitted)
	_, err := tx.Exec(t.Context(), `SELECT FROM ratelimit.buckets WHERE name = $1 AND key = $2 FOR UPDATE`, name, key)
	require.NoError(t, err)
	return func() { require.NoError(t, tx.Rollback(context.WithoutCancel(t.Context()))) }
}

// A call waits for a locked row up to Config.Timeout. A refusal does not wait.
func TestARowOfSlotsThatSomebodyHolds(t *testing.T) {
	t.Parallel()
	s := newStand(t)
	one, two, full := daylong("one", 2).For("ada"), daylong("two", 2).For("ada"), daylong("full", 1).For("ada")
	lease := acquire(t, s.limiter, one, two)
	release := s.outside.holdRow(t, "one", "ada")
	impatient := s.with(t, ratelimit.Config{Timeout: 50 * time.Millisecond})
	require.ErrorIs(t, impatient.Release(t.Context(), lease.ID), context.DeadlineExceeded)
	require.ErrorIs(t, errOf(impatient.RenewLease(t.Context(), lease.ID)), context.DeadlineExceeded)
	require.ErrorIs(t, errOf(impatient.Acquire(t.Context(), one)), context.DeadlineExceeded)
	s.awaitNoWaiter(t) // otherwise an abandoned statement might get the row after all
	released := make(chan error, 1)
	go func() { released <- s.limiter.Release(t.Context(), lease.ID) }()
	s.awaitWaiter(t)
	release()
	require.NoError(t, <-released)
	s.requireHealthy(t)

	acquire(t, s.limiter, full)
	defer s.outside.holdRow(t, "full", "ada")()
	refused(t, s.limiter, full)
	refused(t, s.limiter, full, daylong("one", 2).For("new"))
	require.Zero(t, s.outside.count(t, `SELECT count(*) FROM ratelimit.buckets WHERE key = 'new'`))
}

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
