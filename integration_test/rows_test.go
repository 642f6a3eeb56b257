package integration_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// daylong returns a limit on concurrency whose leases outlive any test.
func daylong(name string, most int) ratelimit.Limit {
	return ratelimit.Define(name, ratelimit.Concurrency{Slots: most, Lease: 24 * time.Hour})
}

// slots returns a limit on concurrency with a long lease.
func slots(name string, most int) ratelimit.Limit {
	return ratelimit.Define(name, ratelimit.Concurrency{Slots: most, Lease: time.Hour})
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

// acquire acquires free slots.
func acquire(t *testing.T, l *ratelimit.Limiter, requests ...ratelimit.Request) ratelimit.Lease {
	t.Helper()
	lease, err := l.Acquire(t.Context(), requests...)
	require.NoError(t, err)
	require.True(t, lease.Allowed)
	return lease
}

// refused asks for slots that are not free.
func refused(t *testing.T, l *ratelimit.Limiter, requests ...ratelimit.Request) {
	t.Helper()
	lease, err := l.Acquire(t.Context(), requests...)
	require.NoError(t, err)
	require.False(t, lease.Allowed)
	require.Empty(t, lease.ID)
	require.Zero(t, lease.Fence)
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
func TestARowOfSlotsThatIsLocked(t *testing.T) {
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

// acquireAndRelease returns the ID of a lease that was given back.
func acquireAndRelease(t *testing.T, l *ratelimit.Limiter) string {
	t.Helper()
	lease := acquire(t, l, daylong("others", 1).For("k"))
	require.NoError(t, l.Release(t.Context(), lease.ID))
	return lease.ID
}

// A wrong clock is reported once, by the call that finds it.
func TestAWrongClockIsReportedOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for name, call := range map[string]call{
		"Take": everyCall["Take"],
		"AtOnce": func(ctx context.Context, limiter *ratelimit.Limiter, _ string, request ratelimit.Request) error {
			return atonce.Do(32, func(int) error { return errOf(limiter.Take(ctx, request)) })
		},
		"InTx": func(ctx context.Context, limiter *ratelimit.Limiter, _ string, request ratelimit.Request) error {
			return limiter.InTx(ctx, func(tx pgx.Tx) error { return errOf(limiter.WithTx(tx).Take(ctx, request)) })
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var mended atomic.Int64
			limiter, request := b.with(t, ratelimit.Config{Observer: observing(func(e event.Event) {
				if _, is := e.(event.ClockRepaired); is {
					mended.Add(1)
				}
			})}), pinch.For(t.Name())
			takeAll(t, limiter, request)
			b.exec(t, `UPDATE ratelimit.buckets SET ts = ts + $1 WHERE key = $2`, ratelimit.Day.Microseconds(), t.Name())
			for range 2 {
				require.NoError(t, call(t.Context(), limiter, "", request))
				require.EqualValues(t, 1, mended.Load())
			}
		})
	}
}

// What puts the clock of a row right concerns that row alone: it waits for no other, and makes none.
func TestAWrongClockIsCorrectedInPlace(t *testing.T) {
	t.Parallel()
	for name, config := range map[string]ratelimit.Config{"Batching": {}, "NoBatching": {NoBatching: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			limiter, other := b.with(t, config), ratelimit.Define("zother", hoard(2))
			for _, request := range []ratelimit.Request{pinch.For("wrong a"), pinch.For("wrong b"), other.For("held")} {
				takeAll(t, b.limiter, request)
			}
			b.exec(t, `UPDATE ratelimit.buckets SET ts = ts + $1 WHERE starts_with(key, 'wrong')`, ratelimit.Day.Microseconds())
			_, err := b.begin(t, pgx.ReadCommitted).Exec(t.Context(), `SELECT FROM ratelimit.buckets WHERE key = 'held' FOR UPDATE`)
			require.NoError(t, err)
			for _, requests := range [][]ratelimit.Request{
				{pinch.For("wrong a"), other.For("missing")},
				{pinch.For("wrong b"), other.For("held")},
			} {
				d, err := limiter.Take(t.Context(), requests...)
				require.NoError(t, err)
				require.False(t, d.Allowed)
			}
			require.Empty(t, b.rows(t, "missing"))
		})
	}
}

// slider is a window from which nothing falls out during a test.
var slider = ratelimit.Define("slider", ratelimit.SlidingWindow{Rate: 1e6, Period: ratelimit.Week})

// TestSlidingWindowRowsStaySmall takes in one slice after the other, from a row whose key is as long as a key may be.
// The row drops expired slices from time to time. Doing so with each slice would write all of the row to the log. The
// row stays below 2,000 bytes, from where on Postgres would compress it or store it elsewhere.
func TestSlidingWindowRowsStaySmall(t *testing.T) {
	t.Parallel()
	const slices, moves, spare = 128, 300, 44
	d := setup(t).desk(t, ratelimit.Config{})
	window := ratelimit.SlidingWindow{Rate: 2 * moves, Period: slices * time.Second, Slices: slices}
	request := ratelimit.Define(strings.Repeat("n", 64), window).For(fmt.Sprintf("%0256d", slices))
	length, dropped := 0, 0
	for i := range moves {
		d.at(time.Duration(i) * time.Second)
		in := callers()[[]int{0, 3}[i%2]] // a transaction, or none
		decision, err := in.take(t.Context(), d.pool, d.limiter, request)
		require.NoError(t, err)
		require.InDelta(t, 2*moves-min(i, slices)-1, decision.Remaining, 0, "move %d", i)
		before, row, array := length, 0, 0
		require.NoError(t, d.pool.QueryRow(t.Context(),
			`SELECT cardinality(taken), pg_column_size(b), pg_column_size(taken) FROM ratelimit.buckets AS b`).Scan(&length, &row, &array))
		require.LessOrEqual(t, length, 4+slices+spare)
		require.Less(t, row, 2000)
		require.Greater(t, array, 8*length, "not compressed")
		if length < before {
			require.Equal(t, 4+slices, length, "what counts stays")
			dropped++
		}
	}
	require.Positive(t, dropped)
	require.LessOrEqual(t, dropped, (moves-slices)/spare)
}

// The first call after the instant of a change writes the row under its lock, and the next one takes one round trip.
func TestARowIsSettledOnceAndThenOnTheFastPath(t *testing.T) {
	t.Parallel()
	w := &wire{}
	change := eraChange{before: ratelimit.PerMinute(10), after: ratelimit.PerMinute(100), onChange: ratelimit.ScaleTokens}
	d := setup(t, w.on).changing(t, ratelimit.Config{NoBatching: true}, map[string]eraChange{"limit": change})
	request := changingLimit("limit").For("key")
	take := func() { requireAllowed(t, taking(request), d.limiter) }
	requireAllowed(t, taking(request.Cost(5)), d.limiter)
	d.at(0)
	require.Greater(t, w.count(take), 1, "under the lock of its row")
	require.Equal(t, 1, w.count(take))
	require.InDelta(t, 51.67-2, tokens(t, d.limiter, request), 0.01, "5.167 of 10 became 51.67 of 100")
}

// countedSource is a source of one rule for all limits. It may panic instead.
type countedSource struct {
	rule   *ratelimit.Ruling
	panics bool
	asked  int
}

func (s *countedSource) RulingFor(ratelimit.Limit, string, string) *ratelimit.Ruling {
	if s.asked++; s.panics {
		panic("the source is out of order")
	}
	return s.rule
}

func (s *countedSource) RulingsOf(string) []*ratelimit.Ruling { return nil }

// If the source of rules panics or returns the rule of another limit, the definition in the code decides, and the
// Observer is notified.
func TestASourceThatFailsLeavesTheDefinitionInTheCode(t *testing.T) {
	t.Parallel()
	foreign, err := ratelimit.NewRuling(ratelimit.Define("other", ratelimit.PerMinute(3)), ratelimit.RulingConfig{})
	require.NoError(t, err)
	for name, source := range map[string]*countedSource{"it panics": {panics: true}, "it has a rule of another limit": {rule: foreign}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var heard []event.Failed
			limiter := inMemory.setup(t).with(t, ratelimit.Config{Policies: source, Observer: observing(func(e event.Event) {
				if failed, is := e.(event.Failed); is {
					heard = append(heard, failed)
				}
			})})
			d, err := limiter.Take(t.Context(), ratelimit.Define("api", ratelimit.PerMinute(10)).For("ada"))
			require.NoError(t, err)
			require.Equal(t, 1, source.asked, "once for each request")
			require.True(t, d.Allowed)
			require.InDelta(t, 9, d.Remaining, 0)
			require.Empty(t, d.States[0].Rule)
			require.Len(t, heard, 1)
			require.Equal(t, "api", heard[0].Limit)
			require.ErrorContains(t, heard[0].Err, "Config.Policies")
		})
	}
}
