package prefetch

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

var (
	// still gains next to nothing while a test runs, fast gains 100 a second, and few is soon used up.
	still = ratelimit.Define("still", ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: 10_000})
	fast  = ratelimit.Define("fast", ratelimit.TokenBucket{Rate: 100, Period: time.Second, Capacity: 10_000})
	few   = ratelimit.Define("few", ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: 100})
	// window ends 5 seconds after the begin of a bubble.
	window = ratelimit.Define("window", ratelimit.FixedWindow{Rate: 10_000, Period: 10 * time.Second, Start: bubble.Add(5 * time.Second)})
	today  = ratelimit.Define("today", ratelimit.CalendarWindow{Rate: 10_000, Resets: ratelimit.Daily})

	hot = still.For("hot")
)

// bubble is when the time of a bubble begins.
var bubble = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

func limits() Limits {
	return Limits{still: {For: 10 * time.Second}, fast: {For: time.Second}, few: {For: time.Minute}, window: {For: 10 * time.Second}, today: {For: time.Hour}}
}

// pass lets d pass, and waits until what that sets off has ended.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// stand is a process, and its database.
type stand struct {
	*testing.T
	*Limiter

	db *database
}

// allows makes a call that is allowed, and reports whether it was answered from memory.
func (s *stand) allows(request ratelimit.Request) (d ratelimit.Decision, fromMemory bool) {
	s.Helper()
	d, fromMemory, err := take(s.Context(), s.Limiter, request)
	require.NoError(s, err)
	require.True(s, d.Allowed)
	return d, fromMemory
}

// warm takes until n prefetched tokens are left.
func (s *stand) warm(request ratelimit.Request, n float64) {
	s.Helper()
	for range 10_000 {
		if _, fromMemory := s.allows(request); fromMemory && s.kept() == n {
			return
		}
	}
	require.Fail(s, "nothing is prefetched")
}

// freeze stops the looks for unused tokens, as in a process that stands still.
func (s *stand) freeze(request ratelimit.Request) *holding {
	for i := range s.stripes {
		for _, h := range s.stripes[i].of {
			if h.request == request.Cost(0) {
				h.timer.Stop()
				return h
			}
		}
	}
	return nil
}

// takeFor makes a call whose caller gives up after a while, and returns its error.
func (s *stand) takeFor(patience time.Duration) error {
	ctx, leave := context.WithTimeout(s.Context(), patience)
	defer leave()
	_, err := s.Take(ctx, hot)
	return err
}

// fails plays three calls that wait for a fetch, which fails as fetch does. They go to the database themselves.
func fails(fetch func() error) func(s *stand) {
	return func(s *stand) {
		s.warm(hot, 0)
		var calls atomic.Int64
		s.db.change(func() {
			s.db.before = func(context.Context) error {
				time.Sleep(time.Millisecond)
				if calls.Add(1) == 1 {
					return fetch()
				}
				return nil
			}
		})
		var waiting sync.WaitGroup
		for range 3 {
			waiting.Go(func() {
				if err := s.takeFor(time.Minute); err != nil {
					s.Error(err)
				}
			})
		}
		waiting.Wait()
		s.allows(hot)
	}
}

// A process that prefetches, in stories about its database.
func TestPrefetch(t *testing.T) {
	t.Parallel()
	for name, story := range map[string]func(s *stand){
		"TakesMoreWhileItIsUsedUp": func(s *stand) {
			for range 1000 {
				s.allows(hot)
			}
			require.Equal(s, []float64{1, 2, 3, 5, 9, 17, 33, 65, 129, 257, 513}, s.db.asked)
			pass(time.Minute)
			require.Zero(s, s.kept())
			require.Zero(s, s.count.Load(), "who is not used is forgotten")
			require.InDelta(s, 9000, s.db.holds(hot), 0.01, "all is returned")
			require.InDelta(s, s.db.changed.Taken, s.db.changed.Returned+s.db.changed.Lost+1000-1, 0.01)
		},
		// When a bucket is nearly empty, no tokens are prefetched, so the last tokens go to any caller.
		"LeavesSomeForOthers": func(s *stand) {
			for range 100 {
				s.allows(few.For("hot"))
			}
			d, err := s.Take(s.Context(), few.For("hot"))
			require.NoError(s, err)
			require.False(s, d.Allowed)
			require.LessOrEqual(s, slices.Max(s.db.asked), 1+100.0/8)
		},
		// Calls during a fetch wait for it, and share its tokens.
		"IsOneAtATime": func(s *stand) {
			s.warm(hot, 0)
			s.db.change(func() { s.db.before = func(context.Context) error { time.Sleep(time.Millisecond); return nil } })
			for len(s.db.asked) < 11 {
				s.allows(hot)
			}
			s.warm(hot, 0)
			s.db.change(func() { s.db.asked = nil })
			began := time.Now()
			var waiting sync.WaitGroup
			for range 500 {
				waiting.Go(func() {
					if d, fromMemory, err := take(s.Context(), s.Limiter, hot); err != nil || !d.Allowed || !fromMemory {
						s.Error(d, err)
					}
				})
			}
			waiting.Wait()
			require.Len(s, s.db.asked, 1)
			require.Equal(s, time.Millisecond, time.Since(began))
		},
		"FailsWithAnError":    fails(func() error { return errors.New("the connection was lost") }),
		"FailsWithAPanic":     fails(func() error { panic("a tracer") }),
		"FailsWhenAHookExits": fails(func() error { runtime.Goexit(); return nil }),
		"EndsWhenTheRowRefuses": func(s *stand) {
			s.warm(hot, 0)
			_, err := s.db.limiter.Take(s.Context(), hot.Cost(s.db.holds(hot))) // another process takes all
			require.NoError(s, err)
			d, err := s.Take(s.Context(), hot)
			require.NoError(s, err)
			require.False(s, d.Allowed)
			require.NoError(s, s.db.limiter.Reset(s.Context(), hot))
			s.allows(hot)
		},
		// If a caller gives up, the fetch goes on for the others.
		"IsLeftByOne": func(s *stand) {
			s.warm(hot, 0)
			s.db.change(func() { s.db.before = func(context.Context) error { time.Sleep(100 * time.Millisecond); return nil } })
			gone := make(chan error)
			go func() { gone <- s.takeFor(time.Millisecond) }()
			synctest.Wait()
			_, fromMemory := s.allows(hot)
			require.True(s, fromMemory)
			require.ErrorIs(s, <-gone, context.DeadlineExceeded)
		},
		// A call does not wait for a slow fetch, but goes to the database itself.
		"WaitsForAWhile": func(s *stand) {
			s.warm(hot, 0)
			var calls atomic.Int64
			s.db.change(func() {
				s.db.before = func(context.Context) error {
					if calls.Add(1) == 1 {
						time.Sleep(time.Hour)
					}
					return nil
				}
			})
			began := time.Now()
			_, fromMemory := s.allows(hot)
			require.False(s, fromMemory)
			require.Equal(s, patience, time.Since(began))
			ctx, cancel := context.WithTimeout(s.Context(), time.Second)
			defer cancel()
			require.ErrorIs(s, s.Close(ctx), context.DeadlineExceeded)
			pass(time.Hour)
		},
		// Nobody uses the tokens of a fetch that ends after a Close that didn't wait for it. They go back.
		"ReturnsAFetchThatOutlastsClose": func(s *stand) {
			s.warm(hot, 0)
			synctest.Wait() // until the fetch has reported
			row, before := s.db.holds(hot), s.db.changed
			s.db.change(func() {
				s.db.before = func(ctx context.Context) error { time.Sleep(time.Second); return ctx.Err() }
			})
			gone := make(chan error)
			go func() { gone <- s.takeFor(time.Millisecond) }()
			synctest.Wait()
			ended, end := context.WithCancel(s.Context())
			end()
			require.ErrorIs(s, s.Close(ended), context.Canceled)
			require.ErrorIs(s, <-gone, context.DeadlineExceeded)
			pass(time.Minute)
			require.Greater(s, s.db.changed.Taken, before.Taken)
			require.Equal(s, s.db.changed.Taken-before.Taken, s.db.changed.Returned-before.Returned+s.db.changed.Lost-before.Lost)
			require.InDelta(s, row, s.db.holds(hot), 0.01)
		},
		// Prefetched tokens end after a while, however many are left.
		"EndsAfterAWhile": func(s *stand) {
			s.warm(fast.For("hot"), 100)
			h := s.freeze(fast.For("hot"))
			time.Sleep(time.Second - 1)
			_, fromMemory := s.allows(fast.For("hot"))
			require.True(s, fromMemory)
			s.db.change(func() { s.db.asked = nil })
			time.Sleep(time.Nanosecond)
			s.allows(fast.For("hot"))
			require.Len(s, s.db.asked, 1)
			require.True(s, h.left == 0 || h.from.taken == s.db.asked[0])
		},
		// The row is never fuller than without the tokens that are returned to it.
		"ReturnsNoMoreThanHasNotArrived": func(s *stand) {
			s.warm(fast.For("hot"), 400)
			h := s.freeze(fast.For("hot"))
			taken := h.from.taken
			pass(time.Second)
			require.NoError(s, s.Close(s.Context()))
			want := taken - 100*(time.Second+minReturn).Seconds()*1.001
			require.InDelta(s, min(400, want), s.db.changed.Returned, 0.01)
			require.InDelta(s, 400-min(400, want), s.db.changed.Lost, 0.01)
		},
		// The prefetched tokens of a window end with it. Tokens left then are lost; before the end they are returned.
		"EndsWithTheWindow": func(s *stand) {
			request, end := window.For("hot"), bubble.Add(5*time.Second)
			s.warm(request, 100)
			s.freeze(request)
			time.Sleep(time.Until(end) - 100*time.Millisecond)
			d, fromMemory := s.allows(request)
			require.True(s, fromMemory)
			require.LessOrEqual(s, d.ResetAfter, 100*time.Millisecond, "all arrives with the next window")
			pass(time.Until(end))
			s.db.change(func() { s.db.asked = nil })
			s.allows(request)
			require.Len(s, s.db.asked, 1)
			require.NoError(s, s.Close(s.Context()))
			require.InDelta(s, 99, s.db.changed.Lost, 0)
			require.InDelta(s, 10_000-1, s.db.holds(request), 0)
		},
		"IsGivenBackInItsWindow": func(s *stand) {
			s.warm(window.For("hot"), 100)
			before := s.db.holds(window.For("hot"))
			pass(4 * time.Second)
			require.Zero(s, s.kept())
			require.InDelta(s, before+100, s.db.holds(window.For("hot")), 0)
			require.Zero(s, s.db.changed.Lost)
		},
		"ServesCalendarWindows": func(s *stand) {
			s.warm(today.For("hot"), 100)
			s.freeze(today.For("hot"))
			time.Sleep(59 * time.Minute)
			_, fromMemory := s.allows(today.For("hot"))
			require.True(s, fromMemory)
		},
		// If a process has too many keys, calls for new keys go to the database.
		"IsBounded": func(s *stand) {
			s.count.Store(maxHoldings)
			for range 20 {
				_, fromMemory := s.allows(hot)
				require.False(s, fromMemory)
			}
		},
		"PassesOtherCalls": func(s *stand) {
			s.warm(hot, 100)
			s.db.change(func() { s.db.asked = nil })
			s.allows(hot.Cost(0))
			s.allows(ratelimit.Define("other", ratelimit.PerDay(10)).For("hot"))
			_, err := s.Take(s.Context(), hot, few.For("hot"))
			require.NoError(s, err)
			for _, cost := range []float64{-1, 1e-10} {
				_, err = s.Take(s.Context(), hot.Cost(cost))
				require.ErrorIs(s, err, ratelimit.ErrInvalidCost)
			}
			_, err = s.Take(nil, hot) //nolint:staticcheck // a nil context gets the error of the ratelimit.Limiter
			require.Error(s, err)
			require.Equal(s, []float64{0, 1, 1, -1, 1e-10, 1}, s.db.asked)
			require.InDelta(s, 100, s.kept(), 0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newDatabase(t)
				s := &stand{t, db.process(limits()), db}
				story(s)
				if s.isOpen() {
					require.NoError(t, s.Close(t.Context()))
				}
			})
		})
	}
}

// pages are Policies of a test.
type pages struct {
	mu     sync.Mutex
	ruling *ratelimit.Ruling
}

func (p *pages) RulingFor(ratelimit.Limit, string, string) *ratelimit.Ruling {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ruling
}

func (p *pages) RulingsOf(string) []*ratelimit.Ruling { return nil }

// A rule or a pause that changes is followed once the tokens that are kept have ended, at the latest.
func TestRulesAreFollowedWithinFor(t *testing.T) {
	t.Parallel()
	for name, config := range map[string]ratelimit.RulingConfig{
		"Pause":       {PausedUntil: bubble.Add(ratelimit.Day)},
		"LowerLimit":  {Revisions: []ratelimit.Revision{{Policy: ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: 1}}}},
		"AnotherKind": {Revisions: []ratelimit.Revision{{Policy: ratelimit.SlidingWindow{Rate: 1, Period: ratelimit.Day}}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				rules := &pages{}
				limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{Policies: rules})
				require.NoError(t, err)
				l, err := New(limiter, Config{Limits: limits()})
				require.NoError(t, err)
				for l.kept() < 500 {
					require.NoError(t, l.Require(t.Context(), hot))
				}
				ruling, err := ratelimit.NewRuling(still, config)
				require.NoError(t, err)
				rules.mu.Lock()
				rules.ruling = ruling
				rules.mu.Unlock()
				changed := time.Now()
				for allowed := true; allowed; time.Sleep(100 * time.Millisecond) {
					d, err := l.Take(t.Context(), hot)
					require.NoError(t, err)
					allowed = d.Allowed
					require.LessOrEqual(t, time.Since(changed), 10*time.Second+200*time.Millisecond)
				}
				require.NoError(t, l.Close(t.Context()))
			})
		})
	}
}

// A limit in shadow mode, or off, is not prefetched, so its refusals are its own.
func TestLimitsThatAreNotEnforcedAreNotPrefetched(t *testing.T) {
	t.Parallel()
	for _, mode := range []ratelimit.Mode{ratelimit.Shadow, ratelimit.Off} {
		ruling, err := ratelimit.NewRuling(still, ratelimit.RulingConfig{Revisions: []ratelimit.Revision{{Mode: mode}}})
		require.NoError(t, err)
		limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{Policies: &pages{ruling: ruling}})
		require.NoError(t, err)
		l, err := New(limiter, Config{Limits: limits()})
		require.NoError(t, err)
		for range 100 {
			require.NoError(t, l.Require(t.Context(), hot))
			require.Zero(t, l.kept())
		}
	}
}

func TestAsked(t *testing.T) {
	t.Parallel()
	h := &holding{keep: 8000, numbers: ratelimit.Spec{Capacity: 800}, row: 800}
	now := time.Duration(0)
	for _, step := range []struct {
		gap  time.Duration
		pace float64
	}{{5000, 0}, {999, 2}, {999, 4}, {1000, 4}, {4000, 4}, {4001, 2}, {0, 4}, {0, 8}, {0, 16}, {0, 32}, {0, 64}, {0, 100}, {0, 100}} {
		now += step.gap
		h.asked(now, 2)
		require.InDelta(t, step.pace, h.pace, 0, "after %d", step.gap)
	}
	require.InDelta(t, 100, h.ahead(2), 0)
	h.row = 102
	require.InDelta(t, 24, h.ahead(2), 0, "a share of what there is, for whole calls")
	for _, h.row = range []float64{9, 0, -50} {
		require.Zero(t, h.ahead(2))
	}
}

// Prefetched tokens are returned once their time is over, or none was used for a while.
func TestIsLeft(t *testing.T) {
	t.Parallel()
	h := &holding{keep: time.Hour, from: &stock{taken: 10, ends: time.Second}, left: 1}
	require.False(t, h.isLeft(time.Second-1))
	require.True(t, h.isLeft(time.Second))
	h.from.ends = time.Hour
	require.False(t, h.isLeft(time.Hour/4-1))
	require.True(t, h.isLeft(time.Hour/4))
	h.usedAt, h.left = time.Hour/2, 6
	require.True(t, h.isLeft(time.Hour/2), "most of them are left")
	h.left = 5
	require.False(t, h.isLeft(time.Hour/2))
}

func TestNewNamesWhatIsWrong(t *testing.T) {
	t.Parallel()
	limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{})
	require.NoError(t, err)
	second := Terms{For: time.Second}
	for says, limits := range map[string]Limits{
		"no Limits":           nil,
		"zero Limit":          {ratelimit.Limit{}: second},
		"use 1ms to 1h":       {still: {}},
		"For of 2h0m0s":       {still: {For: 2 * time.Hour}},
		"CalendarWindow":      {ratelimit.Define("slots", ratelimit.Concurrency{Slots: 1, Lease: time.Second}): second},
		"without Shards":      {ratelimit.Define("shards", ratelimit.TokenBucket{Rate: 1, Period: time.Second, Shards: 2}): second},
		"the Capacity None":   {ratelimit.Define("none", ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: ratelimit.None}): second},
		"only tokens of a To": {ratelimit.Define("sliding", ratelimit.SlidingWindow{Rate: 1, Period: time.Second}): second},
	} {
		_, err := New(limiter, Config{Limits: limits})
		require.ErrorIs(t, err, ratelimit.ErrInvalidConfig, says)
		require.ErrorContains(t, err, says)
	}
	_, err = New(nil, Config{Limits: limits()})
	require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
	require.NoError(t, limiter.InTx(t.Context(), func(tx pgx.Tx) error {
		_, err := New(limiter.WithTx(tx), Config{Limits: limits()})
		require.ErrorContains(t, err, "WithTx")
		return nil
	}))
}

// An answer from memory makes one allocation: its states.
func TestAllocations(t *testing.T) { //nolint:paralleltest // it counts allocations
	db := newDatabase(t)
	l := newOn(db.limiter, Config{Limits: Limits{still: {For: time.Hour}}})
	for l.kept() < 1200 {
		require.NoError(t, l.Require(t.Context(), hot))
	}
	require.LessOrEqual(t, testing.AllocsPerRun(1000, func() { _, _ = l.Take(t.Context(), hot) }), 1.0)
}

func BenchmarkTake(b *testing.B) {
	limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{})
	require.NoError(b, err)
	limit := ratelimit.Define("hot", ratelimit.TokenBucket{Rate: 1e9, Period: time.Second, Capacity: 1e12})
	l, err := New(limiter, Config{Limits: Limits{limit: {For: time.Second}}})
	require.NoError(b, err)
	b.ReportAllocs()
	for b.Loop() {
		require.NoError(b, l.Require(b.Context(), limit.For("alice")))
	}
}
