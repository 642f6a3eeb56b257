package ahead

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// ledger is the row of one bucket, in place of a database. It calls before with each call, and then decides.
type ledger struct {
	mu      sync.Mutex
	row     *bucket.State
	asked   []float64 // the cost of each call
	before  func(ctx context.Context, cost float64) error
	given   []bucket.Ahead
	changed Event  // the sum of all events
	observe func() // called at each event, and not under mu; nil: nothing is
}

func (l *ledger) Fetch(ctx context.Context, c *store.Call) error {
	a, now := &c.Asks[0], time.Now().UnixMicro()
	l.mu.Lock()
	l.asked = append(l.asked, a.Cost)
	before := l.before
	l.mu.Unlock()
	if before != nil {
		if err := before(ctx, a.Cost); err != nil {
			return err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	r := bucket.Answer{Now: now, State: a.Terms.Full(now)}
	if l.row != nil {
		r.State = *l.row
	}
	r.State, r.Allowed = buckettest.Take(a.Terms, r.State, now, a.Cost, 0)
	l.row = &r.State
	c.Answers = []bucket.Answer{r}
	return nil
}

// GiveBack gives back to the row.
func (l *ledger) GiveBack(_ context.Context, _ bucket.Key, t bucket.Terms, kept bucket.Ahead, _ time.Duration) (float64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.given = append(l.given, kept)
	now := time.Now().UnixMicro()
	given := kept.Returnable(&t, l.row.TS, now)
	*l.row = kept.Return(&t, *l.row, now)
	return given, nil
}

// Tell adds up the events of the prefetch.
func (l *ledger) Tell(e Event) {
	if l.observe != nil {
		l.observe()
	}
	l.mu.Lock()
	l.changed.Taken, l.changed.Returned, l.changed.Lost = l.changed.Taken+e.Taken, l.changed.Returned+e.Returned, l.changed.Lost+e.Lost
	l.mu.Unlock()
}

// change changes the ledger, safely beside concurrent calls.
func (l *ledger) change(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f()
}

// held returns the value of the row.
func (l *ledger) held() float64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.row.Value
}

// pass lets d pass, and waits until what that sets off has ended.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// on returns a process on the ledger.
func (l *ledger) on(options Options) *process {
	options.MaxWaiting = 10_000
	return newProcess(l, options)
}

// warm takes until some is taken ahead, and n tokens of that are left.
func warm(t *testing.T, limiter *process, request bucket.Ask, n float64) {
	t.Helper()
	for range 10_000 {
		d, err := limiter.take(t.Context(), request)
		require.NoError(t, err)
		require.True(t, d.Allowed)
		if d.Prefetched && kept(limiter) == n {
			return
		}
	}
	require.Fail(t, "nothing is taken ahead")
}

// kept returns how many tokens a Limiter keeps.
func kept(limiter *process) (tokens float64) {
	for i := range limiter.stripes {
		s := &limiter.stripes[i]
		s.mu.Lock()
		for _, h := range s.of {
			tokens += h.kept.Left
		}
		s.mu.Unlock()
	}
	return tokens
}

const day = 24 * time.Hour

// still is a limit that gains next to nothing while a test runs.
var still = tokenBucket("still", 1, day, 10_000, 10*time.Second)

func TestPrefetchTakesMoreWhileItIsUsedUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		row := &ledger{}
		limiter := row.on(Options{})
		for range 1000 {
			_, err := limiter.take(t.Context(), still.ask("hot", 1))
			require.NoError(t, err)
		}
		require.Equal(t, []float64{1, 2, 3, 5, 9, 17, 33, 65, 129, 257, 513}, row.asked)
		pass(time.Minute)
		require.Zero(t, kept(limiter))
		require.Zero(t, limiter.count.Load(), "who is not used is forgotten")
		require.InDelta(t, still.terms.Capacity-1000, row.row.Value, 0.01, "all is given back")
		require.InDelta(t, row.changed.Taken, row.changed.Returned+row.changed.Lost+1000-11, 0.01)
		limiter.end(t)
	})
}

// When a bucket is nearly empty, no tokens are prefetched, so the last tokens go to any caller.
func TestPrefetchLeavesSomeForOthers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		row := &ledger{}
		few := tokenBucket("few", 1, day, 100, time.Minute)
		limiter, admitted := row.on(Options{}), 0
		for range 200 {
			d, err := limiter.take(t.Context(), few.ask("hot", 1))
			require.NoError(t, err)
			if d.Allowed {
				admitted++
			}
		}
		require.Equal(t, 99, admitted)
		for _, cost := range row.asked {
			require.LessOrEqual(t, cost, 1+few.terms.Capacity/8)
		}
		limiter.end(t)
	})
}

// Calls during a fetch wait for it, and then share the next one.
func TestPrefetchIsOneAtATime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		row := &ledger{}
		limiter := row.on(Options{})
		warm(t, limiter, still.ask("hot", 1), 0)
		row.change(func() {
			row.asked = nil
			row.before = func(context.Context, float64) error { time.Sleep(time.Millisecond); return nil }
		})
		began := time.Now()
		var waiting sync.WaitGroup
		for range 500 {
			waiting.Go(func() {
				d, err := limiter.take(t.Context(), still.ask("hot", 1))
				if err != nil || !d.Allowed || !d.Prefetched {
					t.Error(d, err)
				}
			})
		}
		waiting.Wait()
		require.LessOrEqual(t, len(row.asked), 2)
		require.LessOrEqual(t, time.Since(began), 2*time.Millisecond)
		limiter.end(t)
	})
}

func TestPrefetchThatFailsFailsThoseWhoWait(t *testing.T) {
	t.Parallel()
	lost := errors.New("the connection was lost")
	for name, test := range map[string]struct {
		before func(context.Context, float64) error
		says   string
	}{
		"Error":  {func(context.Context, float64) error { time.Sleep(time.Millisecond); return lost }, "the connection was lost"},
		"Panic":  {func(context.Context, float64) error { time.Sleep(time.Millisecond); panic("a tracer") }, "a hook panicked: a tracer"},
		"Goexit": {func(context.Context, float64) error { time.Sleep(time.Millisecond); runtime.Goexit(); return nil }, "has exited"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				row := &ledger{}
				limiter := row.on(Options{})
				warm(t, limiter, still.ask("hot", 1), 0)
				row.change(func() { row.before = test.before })
				var waiting sync.WaitGroup
				for range 3 {
					waiting.Go(func() {
						d, err := limiter.take(t.Context(), still.ask("hot", 1))
						if err == nil || d.Allowed {
							t.Error(d, err)
							return
						}
						if !strings.Contains(err.Error(), test.says) {
							t.Error(err)
						}
					})
				}
				waiting.Wait()
				row.change(func() { row.before = nil })
				d, err := limiter.take(t.Context(), still.ask("hot", 1))
				require.NoError(t, err)
				require.True(t, d.Allowed)
				limiter.end(t)
			})
		})
	}
}

// A fetch that the row refuses, or that fails after a later caller has left, ends: the next call does not wait for it.
func TestNoCallWaitsForAFetchThatTookNothing(t *testing.T) {
	t.Parallel()
	for name, fetch := range map[string]func(t *testing.T, row *ledger, limiter *process){
		"Refused": func(t *testing.T, row *ledger, limiter *process) {
			t.Helper()
			row.change(func() { row.row.Value = -1 }) // another process has taken all
			d, err := limiter.take(t.Context(), still.ask("hot", 1))
			require.NoError(t, err)
			require.False(t, d.Allowed)
			row.change(func() { row.row.Value = 100 })
		},
		"Left": func(t *testing.T, row *ledger, limiter *process) {
			t.Helper()
			row.change(func() {
				row.before = func(context.Context, float64) error { time.Sleep(time.Second); return errors.New("lost") }
			})
			var first sync.WaitGroup
			first.Go(func() { _, _ = limiter.take(t.Context(), still.ask("hot", 1)) })
			synctest.Wait()
			ctx, leave := context.WithTimeout(t.Context(), time.Millisecond)
			defer leave()
			_, err := limiter.take(ctx, still.ask("hot", 1))
			require.ErrorIs(t, err, context.DeadlineExceeded)
			first.Wait()
			row.change(func() { row.before = nil })
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				row := &ledger{}
				limiter := row.on(Options{Timeout: time.Minute})
				warm(t, limiter, still.ask("hot", 1), 0)
				fetch(t, row, limiter)
				d, err := limiter.take(t.Context(), still.ask("hot", 1))
				require.NoError(t, err)
				require.True(t, d.Allowed)
				limiter.end(t)
			})
		})
	}
}

// An Observer that does not return stops no call for the bucket, or for others of its stripe.
func TestPrefetchDoesNotWaitForItsObserver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		row, hangs := &ledger{}, make(chan struct{})
		row.observe = func() { <-hangs }
		limiter := row.on(Options{})
		for n := 0; n < 10; {
			d, err := limiter.take(t.Context(), still.ask("hot", 1))
			require.NoError(t, err)
			if d.Prefetched && kept(limiter) > 0 {
				n++
			}
		}
		close(hangs)
		limiter.end(t)
	})
}

// If a caller gives up, the other callers still get an answer, and its tokens are kept. When all callers have given up, the fetch
// is cancelled.
func TestPrefetchIsLeft(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		row := &ledger{}
		limiter := row.on(Options{Timeout: time.Minute})
		warm(t, limiter, still.ask("hot", 1), 0)
		slow := func(ctx context.Context, _ float64) error {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(time.Second):
				return nil
			}
		}
		row.change(func() { row.before = slow })
		var waiting sync.WaitGroup
		ctx, leave := context.WithTimeout(t.Context(), time.Millisecond)
		defer leave()
		waiting.Go(func() {
			_, err := limiter.take(ctx, still.ask("hot", 1))
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
		})
		waiting.Go(func() {
			d, err := limiter.take(t.Context(), still.ask("hot", 1))
			if err != nil || !d.Allowed {
				t.Error(d, err)
			}
		})
		waiting.Wait()

		limiter = row.on(Options{Timeout: time.Minute})
		row.change(func() { row.before = nil })
		warm(t, limiter, still.ask("hot", 1), 0)
		row.change(func() { row.before = slow })
		ctx, leave = context.WithTimeout(t.Context(), time.Millisecond)
		defer leave()
		began := time.Now()
		_, err := limiter.take(ctx, still.ask("hot", 1))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, time.Millisecond, time.Since(began))
		synctest.Wait()
		require.Zero(t, limiter.running)

		row.change(func() {
			row.before = func(ctx context.Context, _ float64) error { <-ctx.Done(); return ctx.Err() }
		})
		began = time.Now()
		_, err = limiter.take(t.Context(), still.ask("hot", 1))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, time.Minute, time.Since(began), "the time of Config.Timeout")
		limiter.end(t)
	})
}
