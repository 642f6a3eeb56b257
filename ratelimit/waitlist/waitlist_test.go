package waitlist_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
	"github.com/pgratelimit/pgratelimit/ratelimit/waitlist"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

var exports = ratelimit.Define("exports", ratelimit.Concurrency{Slots: 3, Lease: 30 * time.Second})

// one is a limit with one slot.
var one = ratelimit.Define("exports", ratelimit.Concurrency{Slots: 1, Lease: time.Hour})

func newList(t *testing.T, limiter *ratelimit.Limiter, limit ratelimit.Limit, config waitlist.Config) *waitlist.List {
	t.Helper()
	s, err := waitlist.New(limiter, limit, config)
	require.NoError(t, err)
	return s
}

// TestOrder has ten thousand callers wait for three slots. They come one after the other, and some of the holders die:
// these slots are given again when their leases end. Each caller gets its slot in the order in which it came.
func TestOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newList(t, ratelimittest.New(t, nil), exports, waitlist.Config{})
		const callers, dead = 10_000, 100
		fences := make([]int64, callers)
		var g errgroup.Group
		begun := time.Now()
		for i := range callers {
			g.Go(func() error {
				lease, err := s.Acquire(t.Context(), exports.For("acme"))
				if err != nil {
					return err
				}
				fences[i] = lease.Fence
				if i%(callers/dead) == 0 { // its process dies
					return nil
				}
				time.Sleep(time.Second)
				return s.Release(t.Context(), lease, exports.For("acme"))
			})
			synctest.Wait() // until it waits
		}
		require.NoError(t, g.Wait())
		require.IsIncreasing(t, fences)
		// A slot works for a second, or is lost for 30 s.
		work := time.Duration(callers-dead)*time.Second + time.Duration(dead)*exports.Policy().(ratelimit.Concurrency).Lease
		require.Less(t, time.Since(begun), work/3+time.Minute)
	})
}

// TestTurns has callers of three processes wait for one slot: each process gets it once in three times, and all are
// served.
func TestTurns(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := ratelimittest.NewDB()
		var got []int
		var g errgroup.Group
		for process := range 3 {
			limiter, err := ratelimit.New(db, ratelimit.Config{})
			require.NoError(t, err)
			s := newList(t, limiter, one, waitlist.Config{})
			for range 20 {
				g.Go(func() error {
					return s.Hold(t.Context(), func(context.Context, ratelimit.Lease) error {
						got = append(got, process)
						time.Sleep(time.Duration(1+rand.IntN(1000)) * time.Millisecond)
						return nil
					}, one.For("acme"))
				})
			}
			synctest.Wait()
		}
		require.NoError(t, g.Wait())
		require.Len(t, got, 60)
		for i := 1; i+3 < len(got); i += 3 { // the first one did not wait
			require.ElementsMatch(t, []int{0, 1, 2}, got[i:i+3], "%v", got)
		}
	})
}

// stand is a limiter in memory with a list of its callers.
type stand struct {
	*testing.T
	limiter *ratelimit.Limiter
	list    *waitlist.List
}

// fill acquires all slots.
func (s stand) fill() (held []ratelimit.Lease) {
	s.Helper()
	for range 3 {
		lease, err := s.limiter.Acquire(s.Context(), exports.For("acme"))
		require.NoError(s, err)
		require.True(s, lease.Allowed)
		held = append(held, lease)
	}
	return held
}

// acquire acquires a slot by the list.
func (s stand) acquire() error {
	_, err := s.list.Acquire(s.Context(), exports.For("acme"))
	return err
}

func TestAcquire(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]func(s stand){
		"A free slot is given at once, and nobody stands in line": func(s stand) {
			require.NoError(s, s.acquire())
			value, err := s.limiter.Value(s.Context(), s.list.Limits()[1].For("acme"))
			require.NoError(s, err)
			require.Empty(s, value.Leases())
		},
		"A caller that gives up gets the error of its context, and those behind it go on": func(s stand) {
			held := s.fill()
			gone := errors.New("the client has gone")
			ctx, cancel := context.WithTimeoutCause(s.Context(), time.Second, gone)
			defer cancel()
			var g errgroup.Group
			g.Go(func() error {
				if _, err := s.list.Acquire(ctx, exports.For("acme")); !errors.Is(err, gone) {
					return fmt.Errorf("got %w", err)
				}
				return nil
			})
			synctest.Wait()
			g.Go(s.acquire)
			time.Sleep(5 * time.Second)
			require.NoError(s, s.list.Release(s.Context(), held[0], exports.For("acme")))
			require.NoError(s, g.Wait())
		},
		"A slot that Limiter.Release returned is found by Poll": func(s stand) {
			held := s.fill()
			time.AfterFunc(3*time.Second, func() { _ = s.limiter.Release(s.Context(), held[0].ID) })
			begun := time.Now()
			require.NoError(s, s.acquire())
			require.InDelta(s, 3*time.Second, time.Since(begun), float64(150*time.Millisecond))
		},
		"It waits for the tokens of other limits, and takes them with the slot": func(s stand) {
			starts := ratelimit.Define("starts", ratelimit.PerMinute(1))
			_, err := s.limiter.Take(s.Context(), starts.For("acme"))
			require.NoError(s, err)
			begun := time.Now()
			_, err = s.list.Acquire(s.Context(), exports.For("acme"), starts.For("acme"))
			require.NoError(s, err)
			require.GreaterOrEqual(s, time.Since(begun), 59*time.Second)
			d, err := s.limiter.Check(s.Context(), starts.For("acme"))
			require.NoError(s, err)
			require.False(s, d.Allowed)
		},
		"A place in the line that was lost is taken again": func(s stand) {
			held := s.fill()
			var g errgroup.Group
			g.Go(s.acquire)
			synctest.Wait()
			line := s.list.Limits()[1].For("acme")
			require.NoError(s, s.limiter.Reset(s.Context(), line))
			time.Sleep(10 * time.Second)
			value, err := s.limiter.Value(s.Context(), line)
			require.NoError(s, err)
			require.Len(s, value.Leases(), 1)
			require.NoError(s, s.list.Release(s.Context(), held[0], exports.For("acme")))
			require.NoError(s, g.Wait())
		},
		"The bucket for everybody, several slots and plans can be waited for": func(s stand) {
			all := exports.Global().Cost(3).Plan("pro")
			lease, err := s.list.Acquire(s.Context(), all)
			require.NoError(s, err)
			time.AfterFunc(time.Second, func() { _ = s.list.Release(s.Context(), lease, all) })
			_, err = s.list.Acquire(s.Context(), all)
			require.NoError(s, err)
		},
		"Processes that die ahead in the line delay it by at most two seconds": func(s stand) {
			for range 10 {
				_, err := s.limiter.Acquire(s.Context(), s.list.Limits()[1].For("acme")) // and does not renew it
				require.NoError(s, err)
			}
			begun := time.Now()
			lease, err := s.list.Acquire(s.Context(), exports.For("acme"))
			require.NoError(s, err)
			require.True(s, lease.Allowed)
			require.LessOrEqual(s, time.Since(begun), 2*time.Second)
		},
		"More callers than MaxWaiting are refused": func(s stand) {
			s.fill()
			ctx, cancel := context.WithCancel(s.Context())
			var g errgroup.Group
			for range 5 {
				g.Go(func() error { _, _ = s.list.Acquire(ctx, exports.For("acme")); return nil })
			}
			synctest.Wait()
			_, err := s.list.Acquire(ctx, exports.For("acme"))
			require.ErrorIs(s, err, waitlist.ErrTooManyWaiting)
			require.ErrorContains(s, err, "(5)")
			cancel()
			require.NoError(s, g.Wait())
		},
		"All callers get the error of a database that does not answer": func(s stand) {
			s.fill()
			var g errgroup.Group
			var failed atomic.Int32
			for range 5 {
				g.Go(func() error {
					if _, err := s.list.Acquire(s.Context(), exports.For("acme")); errors.Is(err, ratelimit.ErrClosed) {
						failed.Add(1)
					}
					return nil
				})
			}
			synctest.Wait()
			require.NoError(s, s.limiter.Close(s.Context()))
			require.NoError(s, g.Wait())
			require.EqualValues(s, 5, failed.Load())
		},
		"Bad requests are refused at once": func(s stand) {
			s.fill()
			_, err := s.list.Acquire(s.Context(), exports.For("acme\x00"))
			require.ErrorIs(s, err, ratelimit.ErrInvalidKey)
			_, err = s.list.Acquire(s.Context(), exports.For("acme"), exports.For("acme").Cost(4))
			require.ErrorIs(s, err, ratelimit.ErrCostExceedsCapacity)
			for _, wrong := range [][]ratelimit.Request{nil, {ratelimit.Define("starts", ratelimit.PerMinute(1)).For("acme")}} {
				_, err = s.list.Take(s.Context(), wrong...)
				require.ErrorIs(s, err, ratelimit.ErrInvalidRequest)
				require.ErrorContains(s, err, `must be for the limit of the waitlist, "exports"`)
				require.ErrorIs(s, s.list.Hold(s.Context(), nil, wrong...), ratelimit.ErrInvalidRequest)
			}
			require.ErrorIs(s, s.list.Release(s.Context(), ratelimit.Lease{}, ratelimit.Request{}), ratelimit.ErrInvalidRequest)
		},
		"Hold releases the slot when the function panics": func(s stand) {
			require.Panics(s, func() {
				_ = s.list.Hold(s.Context(), func(context.Context, ratelimit.Lease) error { panic("a bug") }, exports.For("acme"))
			})
			s.fill()
		},
		"Hold says when the lease is lost": func(s stand) {
			err := s.list.Hold(s.Context(), func(ctx context.Context, lease ratelimit.Lease) error {
				require.NoError(s, s.limiter.Reset(ctx, exports.For("acme")))
				<-ctx.Done()
				return ctx.Err()
			}, exports.For("acme"))
			require.ErrorIs(s, err, ratelimit.ErrLeaseLost)
			require.ErrorIs(s, err, context.Canceled)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				limiter := ratelimittest.New(t, nil)
				test(stand{t, limiter, newList(t, limiter, exports, waitlist.Config{MaxWaiting: 5})})
			})
		})
	}
}

// TestWaitingIsNotReportedAsARefusal has a caller wait for a minute, and a caller whose context ends while a call for
// it is under way.
func TestWaitingIsNotReportedAsARefusal(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		checks := 0
		limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{
			Refused: func(_ context.Context, r ratelimit.Refusal) { t.Errorf("%v was refused", r.Limit) },
			Observer: observer(func(e event.Event) {
				if d, ok := e.(ratelimit.Decided); !ok || d.Decision.Allowed {
					return
				}
				if checks++; checks == 2 { // the first call of the line for it
					cancel()
					time.Sleep(time.Second) // until it has tried to leave
				}
			}),
		})
		require.NoError(t, err)
		l := newList(t, limiter, exports, waitlist.Config{Poll: time.Hour})
		held, err := limiter.Acquire(t.Context(), exports.For("acme").Cost(3))
		require.NoError(t, err)
		held, err = limiter.RenewLease(t.Context(), held.ID)
		require.NoError(t, err)
		begun := time.Now()
		_, err = l.Acquire(ctx, exports.For("acme"))
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, time.Second, time.Since(begun))
		require.Equal(t, 2, checks)
		_, err = l.Acquire(t.Context(), exports.For("acme"))
		require.NoError(t, err)
		require.WithinDuration(t, held.Until, time.Now(), time.Second)
	})
}

// TestTakeWaitsForASlidingWindow has callers wait for tokens of a kind that takes no reservations: two in any minute.
func TestTakeWaitsForASlidingWindow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		limit := ratelimit.Define("mails", ratelimit.SlidingWindow{Rate: 2, Period: time.Minute})
		l := newList(t, ratelimittest.New(t, nil), limit, waitlist.Config{})
		var g errgroup.Group
		at := make([]time.Time, 10)
		for i := range at {
			g.Go(func() error {
				d, err := l.Take(t.Context(), limit.For("ada"))
				at[i] = d.At
				return err
			})
			synctest.Wait()
		}
		require.NoError(t, g.Wait())
		for i := 2; i < len(at); i++ {
			require.False(t, at[i].Before(at[i-1]), "%d", i)
			require.InDelta(t, time.Minute, at[i].Sub(at[i-2]), float64(1100*time.Millisecond), "%d", i) // a slice more
		}
	})
}

func TestNewNamesTheInvalidField(t *testing.T) {
	t.Parallel()
	limiter, long := ratelimittest.New(t, nil), ratelimit.Define(fmt.Sprintf("%060d", 1), ratelimit.PerMinute(1))
	did := func(_ *waitlist.List, err error) error { return err }
	for says, err := range map[string]error{
		"the limiter is nil":     did(waitlist.New(nil, exports, waitlist.Config{})),
		"64":                     did(waitlist.New(limiter, long, waitlist.Config{})),
		"field Poll is 1ns":      did(waitlist.New(limiter, exports, waitlist.Config{Poll: 1})),
		"field MaxWaiting is -1": did(waitlist.New(limiter, exports, waitlist.Config{MaxWaiting: -1})),
		"the zero Limit":         did(waitlist.New(limiter, ratelimit.Limit{}, waitlist.Config{})),
		"field Pool is nil":      newList(t, limiter, exports, waitlist.Config{}).Run(t.Context()),
	} {
		require.ErrorIs(t, err, waitlist.ErrInvalidConfig, says)
		require.ErrorContains(t, err, says)
	}
}

// TestNotifications has processes that never poll share a slot. A release wakes the first in the line, and its leaving
// wakes the next.
func TestNotifications(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	ctx, cancel := context.WithCancel(t.Context())
	var running errgroup.Group
	process := func() (s *waitlist.List, entered, refused chan struct{}) {
		entered, refused = make(chan struct{}, 100), make(chan struct{}, 100)
		limiter, err := ratelimit.New(pool, ratelimit.Config{Observer: observer(func(e event.Event) {
			switch d, ok := e.(ratelimit.Decided); {
			case ok && !d.Decision.Allowed:
				refused <- struct{}{}
			case ok && d.Decision.States[0].Limit.Name() == "exports.line":
				entered <- struct{}{}
			}
		})})
		require.NoError(t, err)
		s = newList(t, limiter, one, waitlist.Config{Pool: pool, Poll: time.Hour})
		running.Go(func() error { _ = s.Run(ctx); return nil })
		return s, entered, refused
	}
	holder, _, _ := process()
	lease, err := holder.Acquire(ctx, one.For("acme"))
	require.NoError(t, err)
	first, _, refusedFirst := process()
	second, enteredSecond, refusedSecond := process()
	var g errgroup.Group
	g.Go(func() error {
		return first.Hold(ctx, func(context.Context, ratelimit.Lease) error {
			<-refusedSecond // it has become the first
			return nil
		}, one.For("acme"))
	})
	<-refusedFirst // without a place in the line, and then with one
	<-refusedFirst
	g.Go(func() error {
		return second.Hold(ctx, func(context.Context, ratelimit.Lease) error { return nil }, one.For("acme"))
	})
	<-enteredSecond
	require.NoError(t, holder.Release(ctx, lease, one.For("acme")))
	require.NoError(t, g.Wait())
	cancel()
	require.NoError(t, running.Wait())
}

// A caller whose context ends while a slot is acquired for it gets the lease: else nobody could release the slot.
func TestACallerThatLeavesGetsTheSlotThatWasAcquired(t *testing.T) {
	t.Parallel()
	ctx, leave := context.WithCancel(t.Context())
	limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{Observer: contextual(func(ctx context.Context, e event.Event) {
		if d, ok := e.(ratelimit.Decided); ok && d.Verb == "acquire" {
			leave()
			require.NoError(t, ctx.Err())
		}
	})})
	require.NoError(t, err)
	s := newList(t, limiter, one, waitlist.Config{})
	lease, err := s.Acquire(ctx, one.For("acme"))
	require.NoError(t, err)
	require.NoError(t, s.Release(t.Context(), lease, one.For("acme")))
}

type contextual func(ctx context.Context, e event.Event)

func (o contextual) Observe(ctx context.Context, e event.Event) { o(ctx, e) }

// A tracer of pgx that panics while the process leaves the line doesn't end the process.
func TestAHookMayPanic(t *testing.T) {
	t.Parallel()
	tracer := &panicking{panicked: make(chan struct{}, 100)}
	pool := postgrestest.New(t, func(c *pgxpool.Config) { c.ConnConfig.Tracer = tracer })
	limiter, err := ratelimit.New(pool, ratelimit.Config{Observer: observer(func(e event.Event) {
		d, ok := e.(ratelimit.Decided)
		if ok && d.Verb == "acquire" && d.Decision.States[0].Limit.Name() == one.Name() && d.Decision.Allowed {
			tracer.armed.Store(true)
		}
	})})
	require.NoError(t, err)
	s := newList(t, limiter, one, waitlist.Config{Poll: time.Millisecond})
	for range 2 {
		held, err := limiter.Acquire(t.Context(), one.For("acme"))
		require.NoError(t, err)
		tracer.armed.Store(false)
		var g errgroup.Group
		var lease ratelimit.Lease
		g.Go(func() (err error) {
			lease, err = s.Acquire(t.Context(), one.For("acme"))
			return err
		})
		require.Eventually(t, func() bool {
			value, err := limiter.Value(t.Context(), s.Limits()[1].For("acme"))
			return err == nil && len(value.Leases()) == 1
		}, time.Minute, time.Millisecond)
		require.NoError(t, limiter.Release(t.Context(), held.ID))
		require.NoError(t, g.Wait())
		<-tracer.panicked
		tracer.armed.Store(false)
		require.NoError(t, limiter.Release(t.Context(), lease.ID))
	}
}

// panicking is a tracer that panics while it is armed.
type panicking struct {
	armed    atomic.Bool
	panicked chan struct{}
}

func (p *panicking) TraceAcquireStart(ctx context.Context, _ *pgxpool.Pool, _ pgxpool.TraceAcquireStartData) context.Context {
	if p.armed.Load() {
		p.panicked <- struct{}{}
		panic("a tracer panicked")
	}
	return ctx
}

func (*panicking) TraceAcquireEnd(context.Context, *pgxpool.Pool, pgxpool.TraceAcquireEndData) {}

func (*panicking) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (*panicking) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// TestRunReportsThatItDoesNotListen promises a Failed for a pool that cannot connect, and for one that has no
// connection to give.
func TestRunReportsThatItDoesNotListen(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		config, err := pgxpool.ParseConfig("postgres://nobody@192.0.2.1/none?sslmode=disable")
		require.NoError(t, err)
		down, dials, stop := errors.New("the server is down"), 0, make(chan struct{})
		config.ConnConfig.DialFunc = func(context.Context, string, string) (net.Conn, error) {
			if dials++; dials > 1 { // as if others had the connections
				<-stop
			}
			return nil, down
		}
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		defer pool.Close()
		defer close(stop)
		defer cancel()
		reported := make(chan event.Failed)
		limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{Observer: observer(func(e event.Event) {
			if failed, is := e.(event.Failed); is {
				reported <- failed
			}
		})})
		require.NoError(t, err)
		ended := make(chan error, 1)
		list := newList(t, limiter, one, waitlist.Config{Pool: pool})
		go func() { ended <- list.Run(ctx) }()
		for _, why := range []error{down, context.DeadlineExceeded} {
			var failed event.Failed
			select {
			case failed = <-reported:
			case <-time.After(10 * time.Second):
				require.FailNow(t, "nothing was reported in ten seconds")
			}
			require.Equal(t, []string{"listen", "exports"}, []string{failed.Verb, failed.Limit})
			require.ErrorIs(t, failed.Err, why)
			require.ErrorContains(t, failed.Err, `waitlist: listen for "exports": get a connection of the pool: `)
		}
		cancel()
		require.NoError(t, <-ended)
	})
}

type observer func(e event.Event)

func (o observer) Observe(_ context.Context, e event.Event) { o(e) }
