package ratelimit

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

	"github.com/pgratelimit/pgratelimit/internal/batch"
	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

func TestPrefetchIsChecked(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		policy Policy
		says   string
	}{
		"TooLong":  {TokenBucket{Rate: 10, Period: time.Second, Capacity: 20, Prefetch: 1001 * time.Millisecond}, "must be 1s or less"},
		"TooShort": {TokenBucket{Rate: 10, Period: time.Second, Prefetch: time.Microsecond}, "from 1ms to 1h"},
		"BelowZero": {
			TokenBucket{Rate: 10, Period: time.Second, Prefetch: -time.Second}, "from 1ms to 1h",
		},
		"Nanoseconds": {TokenBucket{Rate: 10, Period: time.Second, Prefetch: 2*time.Millisecond + 1}, "whole microseconds"},
		"Shards":      {TokenBucket{Rate: 10, Period: time.Second, Shards: 2, Prefetch: 10 * time.Millisecond}, "use one of them"},
		"NoCapacity":  {TokenBucket{Rate: 10, Period: time.Second, Capacity: NoCapacity, Prefetch: 10 * time.Millisecond}, "too long"},
		"Adaptive": {
			Adaptive{Contract: TokenBucket{Rate: 10, Period: time.Second, Prefetch: 10 * time.Millisecond}}, "cannot follow the price",
		},
	} {
		_, err := NewLimit("hot", test.policy)
		require.ErrorIs(t, err, ErrInvalidLimit, name)
		require.ErrorContains(t, err, test.says, name)
	}
	limit := Define("hot", TokenBucket{Rate: 10, Period: time.Second, Capacity: 20, Prefetch: time.Second})
	require.InDelta(t, 10, limit.Capacity(), 0)
	require.Equal(t, "hot: 10 per second, capacity 20, taken ahead for 1s", limit.String())
}

// ledger is the row of one bucket, in place of a database. What it does to each call before it decides, before says.
type ledger struct {
	mu      sync.Mutex
	row     *bucket.State
	asked   []float64 // the cost of each call
	before  func(ctx context.Context, cost float64) error
	given   []bucket.Ahead
	changed Prefetched // the sum of what observers are told
	observe func()     // called at each event, and not under mu; nil: nothing is
}

func (l *ledger) DecideOne(ctx context.Context, c *store.Call) error {
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
	r.State, r.Allowed = a.Terms.Take(r.State, now, a.Cost, 0)
	l.row = &r.State
	c.Answers = []bucket.Answer{r}
	return nil
}

func (l *ledger) RunAlone(context.Context, *store.Call) ([]batch.Blocked[store.Call], error) {
	panic("no batch runs")
}

func (l *ledger) Run(context.Context, []*store.Call, *bucket.Key) []batch.Blocked[store.Call] {
	panic("no batch runs")
}

func (l *ledger) giveBack(_ context.Context, _ bucket.Key, t bucket.Terms, kept bucket.Ahead, _ time.Duration) (float64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.given = append(l.given, kept)
	now := time.Now().UnixMicro()
	given := t.Returnable(kept, l.row.TS, now)
	*l.row = t.Return(*l.row, kept, now)
	return given, nil
}

func (l *ledger) Observe(_ context.Context, event Event) {
	if e, ok := event.(Prefetched); ok {
		if l.observe != nil {
			l.observe()
		}
		l.mu.Lock()
		l.changed.Taken, l.changed.Returned, l.changed.Lost = l.changed.Taken+e.Taken, l.changed.Returned+e.Returned, l.changed.Lost+e.Lost
		l.mu.Unlock()
	}
}

// change changes the ledger beside whoever uses it.
func (l *ledger) change(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f()
}

// held returns what the row holds.
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

// on returns a Limiter on the ledger.
func (l *ledger) on(t *testing.T, config Config) *Limiter {
	t.Helper()
	config.Observer = l
	limiter, err := New(&answering{}, config)
	require.NoError(t, err)
	limiter.batcher = batch.New[store.Call](l, batch.Options{
		Apart: true, Timeout: limiter.config.Timeout, ErrClosed: ErrClosed, ErrOverloaded: ErrOverloaded,
	})
	limiter.prefetched.limiter.batcher, limiter.prefetched.giveTo = limiter.batcher, l.giveBack
	return limiter
}

// warm takes until some is taken ahead, and n tokens of that are left.
func warm(t *testing.T, limiter *Limiter, request Request, n float64) {
	t.Helper()
	for range 10_000 {
		d, err := limiter.Take(t.Context(), request)
		require.NoError(t, err)
		require.True(t, d.Allowed)
		if d.States[0].Prefetched && kept(limiter) == n {
			return
		}
	}
	require.Fail(t, "nothing is taken ahead")
}

// kept returns how many tokens a Limiter keeps.
func kept(limiter *Limiter) (tokens float64) {
	for i := range limiter.prefetched.stripes {
		s := &limiter.prefetched.stripes[i]
		s.mu.Lock()
		for _, h := range s.of {
			tokens += h.kept.Left
		}
		s.mu.Unlock()
	}
	return tokens
}

// still is a limit that gains next to nothing while a test runs.
var still = Define("still", TokenBucket{Rate: 1, Period: Day, Capacity: 10_000, Prefetch: 10 * time.Second})

func TestPrefetchTakesMoreWhileItIsUsedUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		row := &ledger{}
		limiter := row.on(t, Config{})
		for range 1000 {
			_, err := limiter.Take(t.Context(), still.For("hot"))
			require.NoError(t, err)
		}
		require.Equal(t, []float64{1, 2, 3, 5, 9, 17, 33, 65, 129, 257, 513}, row.asked)
		pass(time.Minute)
		require.Zero(t, kept(limiter))
		require.Zero(t, limiter.prefetched.count.Load(), "who is not used is forgotten")
		require.InDelta(t, still.Capacity()-1000, row.row.Value, 0.01, "all is given back")
		require.InDelta(t, row.changed.Taken, row.changed.Returned+row.changed.Lost+1000-11, 0.01)
		require.NoError(t, limiter.Close(t.Context()))
	})
}

// Near the end nothing is taken ahead, and the last tokens go to whoever asks.
func TestPrefetchLeavesSomeForOthers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		row := &ledger{}
		few := Define("few", TokenBucket{Rate: 1, Period: Day, Capacity: 100, Prefetch: time.Minute})
		limiter, admitted := row.on(t, Config{}), 0
		for range 200 {
			d, err := limiter.Take(t.Context(), few.For("hot"))
			require.NoError(t, err)
			if d.Allowed {
				admitted++
			}
		}
		require.Equal(t, 99, admitted)
		for _, cost := range row.asked {
			require.LessOrEqual(t, cost, 1+few.Capacity()/8)
		}
		require.NoError(t, limiter.Close(t.Context()))
	})
}

// Calls that come while a fetch is under way wait for it, and go together.
func TestPrefetchIsOneAtATime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		row := &ledger{}
		limiter := row.on(t, Config{})
		warm(t, limiter, still.For("hot"), 0)
		row.change(func() {
			row.asked = nil
			row.before = func(context.Context, float64) error { time.Sleep(time.Millisecond); return nil }
		})
		began := time.Now()
		var waiting sync.WaitGroup
		for range 500 {
			waiting.Go(func() {
				d, err := limiter.Take(t.Context(), still.For("hot"))
				if err != nil || !d.Allowed || !d.States[0].Prefetched {
					t.Error(d, err)
				}
			})
		}
		waiting.Wait()
		require.LessOrEqual(t, len(row.asked), 2)
		require.LessOrEqual(t, time.Since(began), 2*time.Millisecond)
		require.NoError(t, limiter.Close(t.Context()))
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
				limiter := row.on(t, Config{})
				warm(t, limiter, still.For("hot"), 0)
				row.change(func() { row.before = test.before })
				var waiting sync.WaitGroup
				for range 3 {
					waiting.Go(func() {
						d, err := limiter.Take(t.Context(), still.For("hot"))
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
				d, err := limiter.Take(t.Context(), still.For("hot"))
				require.NoError(t, err)
				require.True(t, d.Allowed)
				require.NoError(t, limiter.Close(t.Context()))
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
		limiter := row.on(t, Config{})
		for n := 0; n < 10; {
			d, err := limiter.Take(t.Context(), still.For("hot"))
			require.NoError(t, err)
			if d.States[0].Prefetched && kept(limiter) > 0 {
				n++
			}
		}
		close(hangs)
		require.NoError(t, limiter.Close(t.Context()))
	})
}

// A caller who leaves leaves nobody else behind, and what it was to get is kept. When all have left, so has the fetch.
func TestPrefetchIsLeft(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		row := &ledger{}
		limiter := row.on(t, Config{Timeout: time.Minute})
		warm(t, limiter, still.For("hot"), 0)
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
			_, err := limiter.Take(ctx, still.For("hot"))
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
		})
		waiting.Go(func() {
			d, err := limiter.Take(t.Context(), still.For("hot"))
			if err != nil || !d.Allowed {
				t.Error(d, err)
			}
		})
		waiting.Wait()

		limiter = row.on(t, Config{Timeout: time.Minute})
		row.change(func() { row.before = nil })
		warm(t, limiter, still.For("hot"), 0)
		row.change(func() { row.before = slow })
		ctx, leave = context.WithTimeout(t.Context(), time.Millisecond)
		defer leave()
		began := time.Now()
		_, err := limiter.Take(ctx, still.For("hot"))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, time.Millisecond, time.Since(began))
		synctest.Wait()
		require.Zero(t, limiter.prefetched.running)

		row.change(func() {
			row.before = func(ctx context.Context, _ float64) error { <-ctx.Done(); return ctx.Err() }
		})
		began = time.Now()
		_, err = limiter.Take(t.Context(), still.For("hot"))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, time.Minute, time.Since(began), "the time of Config.Timeout")
		require.NoError(t, limiter.Close(t.Context()))
	})
}
