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

// acquires takes slots for a lease of a length. The fencing token is greater than those of the leases before.
func acquires(id string, length time.Duration, requests ...ratelimit.Request) act {
	return func(s *story) {
		lease := acquire(s.T, s.limiter, requests...)
		require.Equal(s, length, lease.Until.Sub(lease.At))
		for before, other := range s.leases {
			require.Greater(s, lease.Fence, other.Fence, "%s after %s", id, before)
		}
		s.leases[id] = lease
	}
}

// isRefused asks for slots that are free after wait at the latest.
func isRefused(wait time.Duration, requests ...ratelimit.Request) act {
	return func(s *story) { require.Equal(s, wait, refused(s.T, s.limiter, requests...).RetryAfter) }
}

// prolongs renews a lease, which then ends so long after noon.
func prolongs(id string, until time.Duration) act {
	return func(s *story) {
		lease, err := s.limiter.RenewLease(s.Context(), s.leases[id].ID)
		require.NoError(s, err)
		requireInstant(s.T, clockNoon.Add(until), lease.Until)
		require.Equal(s, []any{s.leases[id].ID, s.leases[id].Fence}, []any{lease.ID, lease.Fence})
	}
}

func releases(id string) act {
	return func(s *story) { require.NoError(s, s.limiter.Release(s.Context(), s.leases[id].ID)) }
}

// isLost renews and releases a lease that is lost.
func isLost(id string) act {
	return func(s *story) {
		require.ErrorIs(s, errOf(s.limiter.RenewLease(s.Context(), s.leases[id].ID)), ratelimit.ErrLeaseLost)
		require.ErrorIs(s, s.limiter.Release(s.Context(), s.leases[id].ID), ratelimit.ErrLeaseLost)
	}
}

// frees checks how many slots are free.
func frees(slots float64, requests ...ratelimit.Request) act {
	return func(s *story) {
		for _, request := range requests {
			requireFree(s.T, s.limiter, slots, request)
		}
	}
}

func resets(requests ...ratelimit.Request) act {
	return func(s *story) { require.NoError(s, s.limiter.Reset(s.Context(), requests...)) }
}

func TestLeases(t *testing.T) {
	t.Parallel()
	two, one, beside, short := slots("jobs", 2).For("k"), daylong("one", 1).For("k"), daylong("two", 1).For("k"), slots("short", 1).For("k")
	play(t, ratelimit.Config{}, map[string][]act{
		"ASlotIsHeldUntilItIsGivenBack": {
			acquires("a", time.Hour, two), acquires("b", time.Hour, two), isRefused(time.Hour, two), releases("a"), isLost("a"), prolongs("b", time.Hour),
			frees(1, two), acquires("c", time.Hour, two), isRefused(time.Hour, two), after(time.Hour - time.Microsecond), frees(0, two),
			after(time.Hour), frees(2, two), isLost("b"),
		},
		"ALeaseOfSeveralEndsWithTheShortest": {acquires("a", time.Hour, short, beside, one), after(time.Minute), prolongs("a", time.Hour+time.Minute)},
		"ALeaseOfWhichAPartIsLost": { // nothing is renewed, and the other parts are released
			acquires("a", time.Hour, short, beside, one), resets(beside), after(time.Minute), isLost("a"), frees(1, one, short, beside),
		},
		"OneFenceForAllRows": {acquires("a", 24*time.Hour, one), releases("a"), acquires("b", 24*time.Hour, beside, one)},
	})
}

// rulesOf returns rules with one for a limit and a plan.
func rulesOf(t *testing.T, limit ratelimit.Limit, plan string, eras ...ratelimit.Era) *ruleBook {
	t.Helper()
	rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Name: limit.Name(), Eras: eras})
	require.NoError(t, err)
	rules := &ruleBook{rules: make(map[[3]string]*ratelimit.Ruling)}
	rules.set(limit.Name(), plan, rule)
	return rules
}

// A rule that changes a limit on concurrency keeps the leases, unless it fills the buckets. Leases are renewed by the rule of their
// key's plan. In shadow mode a slot that is not free is given, but not held.
func TestLeasesUnderRules(t *testing.T) {
	t.Parallel()
	const day = 24 * time.Hour
	jobs, lowered := daylong("jobs", 4), ratelimit.Concurrency{Most: 1, Lease: time.Minute}
	pro, other := jobs.For("ada").Plan("pro"), daylong("other", 5).For("ada")
	era := func(seconds int, policy ratelimit.Policy, how ratelimit.OnChange) ratelimit.Era {
		return ratelimit.Era{From: clockNoon.Add(time.Duration(seconds) * time.Second), Policy: policy, OnChange: how}
	}
	for _, how := range []ratelimit.OnChange{ratelimit.KeepTokens, ratelimit.ScaleTokens, ratelimit.AddTokens} {
		play(t, ratelimit.Config{Policies: rulesOf(t, jobs, "pro", ratelimit.Era{}, era(1, lowered, how))}, map[string][]act{
			"Lowered/" + string(how): {
				acquires("a", day, pro), acquires("b", day, pro.Cost(2)), after(time.Second), frees(-2, pro), prolongs("b", day), // no earlier than before
				releases("b"), isRefused(day-time.Second, pro), releases("a"), acquires("c", time.Minute, pro),
				after(31 * time.Second), prolongs("c", 91*time.Second),
			},
		})
	}
	play(t, ratelimit.Config{Policies: rulesOf(t, jobs, "pro", ratelimit.Era{}, era(1, lowered, ratelimit.ResetTokens))}, map[string][]act{
		"Reset": {acquires("a", day, pro), after(time.Second), isLost("a"), acquires("b", time.Minute, pro)},
	})
	tokens := era(1, ratelimit.TokenBucket{Rate: 8, Period: century}, "")
	play(t, ratelimit.Config{Policies: rulesOf(t, jobs, "pro", ratelimit.Era{}, tokens, era(2, lowered, ""))}, map[string][]act{
		"ToTokensAndBack": {
			acquires("a", day, pro), after(time.Second), func(s *story) {
				require.ErrorIs(s, errOf(s.limiter.Acquire(s.Context(), pro)), ratelimit.ErrInvalidRequest, "the limit has tokens and no slots now")
			}, isLost("a"), after(2 * time.Second), acquires("b", time.Minute, pro), isRefused(time.Minute, pro),
		},
	})
	play(t, ratelimit.Config{Policies: rulesOf(t, jobs, "", ratelimit.Era{Mode: ratelimit.Shadow}), RefusalCache: 100}, map[string][]act{
		"Shadow": {
			acquires("a", day, jobs.For("ada").Cost(4)), after(time.Second), acquires("b", day, jobs.For("ada")), frees(0, jobs.For("ada")),
			prolongs("b", day+time.Second), releases("b"), releases("b"), after(2 * time.Second), acquires("c", day, jobs.For("ada"), other), frees(4, other),
			releases("c"), frees(5, other), frees(0, jobs.For("ada")), releases("a"), frees(4, jobs.For("ada")),
		},
	})
	play(t, ratelimit.Config{Policies: rulesOf(t, jobs, "", ratelimit.Era{Mode: ratelimit.Off})}, map[string][]act{
		"Off": {
			acquires("a", day, jobs.For("ada").Cost(4)), after(time.Second), acquires("b", day, jobs.For("ada"), other), releases("a"), releases("b"),
			func(s *story) { require.Len(s, s.rows(s.T, ""), 1, "only of the other limit") },
		},
	})
	paused := rulesOf(t, jobs, "", ratelimit.Era{})
	play(t, ratelimit.Config{Policies: paused}, map[string][]act{
		"Paused": {
			acquires("a", day, jobs.For("ada")), func(s *story) {
				pause := ratelimit.RulingConfig{Name: "jobs", PausedUntil: clockNoon.Add(time.Minute), PauseReason: "the provider is down"}
				rule, err := ratelimit.NewRuling(jobs, pause)
				require.NoError(s, err)
				paused.set("jobs", "", rule)
				require.Equal(s, pause.PauseReason, refused(s.T, s.limiter, jobs.For("bob"), other).States[0].PauseReason)
			}, isRefused(time.Minute, jobs.For("bob"), other), prolongs("a", day) /* who holds a slot goes on */, releases("a"),
			after(time.Minute), acquires("b", day, jobs.For("bob"), other),
		},
	})
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
	s.endWaiters(t) // otherwise an abandoned statement might get the row after all
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
