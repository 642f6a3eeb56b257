package ahead

import (
	"cmp"
	"context"
	"errors"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

const day = 24 * time.Hour

// still is a limit that gains next to nothing while a test runs.
var still = tokenBucket("still", 1, day, 10_000, 10*time.Second)

// hot is an ask of one token of it.
var hot = still.ask("hot", 1)

// pass lets d pass, and waits until what that sets off has ended.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// stand is a process, and its row.
type stand struct {
	*testing.T
	*process

	row *ledger
}

// warm takes until some is taken ahead, and n tokens of that are left.
func (s *stand) warm(request bucket.Ask, n float64) {
	s.Helper()
	for range 10_000 {
		if d := s.allows(request); d.Prefetched && s.kept() == n {
			return
		}
	}
	require.Fail(s, "nothing is taken ahead")
}

// allows makes a call that is allowed.
func (s *stand) allows(request bucket.Ask) decision {
	s.Helper()
	d, err := s.take(s.Context(), request)
	require.NoError(s, err)
	require.True(s, d.Allowed)
	return d
}

// takeFor makes a call whose caller gives up after a while, and returns its error.
func (s *stand) takeFor(patience time.Duration) error {
	s.Helper()
	ctx, leave := context.WithTimeout(s.Context(), patience)
	defer leave()
	_, err := s.take(ctx, hot)
	return err
}

// kept returns how many tokens a process keeps.
func (s *stand) kept() (tokens float64) {
	for i := range s.stripes {
		of := &s.stripes[i]
		of.mu.Lock()
		for _, h := range of.of {
			tokens += h.kept.Left
		}
		of.mu.Unlock()
	}
	return tokens
}

// aSecond is a decision that takes a second.
func aSecond(ctx context.Context, _ float64) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(time.Second):
		return nil
	}
}

// fails plays three calls that wait for a fetch, which fails as fetch does: each of them fails, and the next call does not.
func fails(says string, fetch func() error) func(s *stand) {
	return func(s *stand) {
		s.warm(hot, 0)
		s.row.change(func() {
			s.row.before = func(context.Context, float64) error { time.Sleep(time.Millisecond); return fetch() }
		})
		var waiting sync.WaitGroup
		for range 3 {
			waiting.Go(func() {
				if err := s.takeFor(time.Minute); err == nil || !strings.Contains(err.Error(), says) {
					s.Error(err)
				}
			})
		}
		waiting.Wait()
		s.row.change(func() { s.row.before = nil })
		s.allows(hot)
	}
}

// tenSeconds is a window of 10,000 tokens, and how long it still lasts.
func tenSeconds() (*limit, time.Time) {
	const period = 10 * time.Second
	end := time.Now().Add(period / 2)
	return fixedWindow("window", 10_000, period, 10_000, end, period), end
}

// A process that prefetches, in stories about its row.
func TestPrefetch(t *testing.T) {
	t.Parallel()
	for name, story := range map[string]func(s *stand){
		"TakesMoreWhileItIsUsedUp": func(s *stand) {
			for range 1000 {
				s.allows(hot)
			}
			require.Equal(s, []float64{1, 2, 3, 5, 9, 17, 33, 65, 129, 257, 513}, s.row.asked)
			pass(time.Minute)
			require.Zero(s, s.kept())
			require.Zero(s, s.count.Load(), "who is not used is forgotten")
			require.InDelta(s, still.terms.Capacity-1000, s.row.row.Value, 0.01, "all is given back")
			require.InDelta(s, s.row.changed.Taken, s.row.changed.Returned+s.row.changed.Lost+1000-11, 0.01)
		},
		// When a bucket is nearly empty, no tokens are prefetched, so the last tokens go to any caller.
		"LeavesSomeForOthers": func(s *stand) {
			few := tokenBucket("few", 1, day, 100, time.Minute)
			for range 99 {
				s.allows(few.ask("hot", 1))
			}
			d, err := s.take(s.Context(), few.ask("hot", 1))
			require.NoError(s, err)
			require.False(s, d.Allowed)
			require.LessOrEqual(s, slices.Max(s.row.asked), 1+few.terms.Capacity/8)
		},
		// Calls during a fetch wait for it, and then share the next one.
		"IsOneAtATime": func(s *stand) {
			s.warm(hot, 0)
			s.row.change(func() {
				s.row.asked = nil
				s.row.before = func(context.Context, float64) error { time.Sleep(time.Millisecond); return nil }
			})
			began := time.Now()
			var waiting sync.WaitGroup
			for range 500 {
				waiting.Go(func() {
					if d, err := s.take(s.Context(), hot); err != nil || !d.Allowed || !d.Prefetched {
						s.Error(d, err)
					}
				})
			}
			waiting.Wait()
			require.LessOrEqual(s, len(s.row.asked), 2)
			require.LessOrEqual(s, time.Since(began), 2*time.Millisecond)
		},
		"FailsWithAnError":    fails("the connection was lost", func() error { return errors.New("the connection was lost") }),
		"FailsWithAPanic":     fails("a hook panicked: a tracer", func() error { panic("a tracer") }),
		"FailsWhenAHookExits": fails("has exited", func() error { runtime.Goexit(); return nil }),
		"EndsWhenTheRowRefuses": func(s *stand) {
			s.warm(hot, 0)
			s.row.change(func() { s.row.row.Value = -1 }) // another process has taken all
			d, err := s.take(s.Context(), hot)
			require.NoError(s, err)
			require.False(s, d.Allowed)
			s.row.change(func() { s.row.row.Value = 100 })
			s.allows(hot)
		},
		// A fetch that fails after a later caller has left ends: the next call does not wait for it.
		"EndsWhenItsCallerHasLeft": func(s *stand) {
			s.warm(hot, 0)
			s.row.change(func() {
				s.row.before = func(context.Context, float64) error { time.Sleep(time.Second); return errors.New("lost") }
			})
			first := make(chan error)
			go func() { first <- s.takeFor(time.Minute) }()
			synctest.Wait()
			require.ErrorIs(s, s.takeFor(time.Millisecond), context.DeadlineExceeded)
			require.Error(s, <-first)
			s.row.change(func() { s.row.before = nil })
			s.allows(hot)
		},
		// An Observer that does not return stops no call for the bucket, or for others of its stripe.
		"DoesNotWaitForItsObserver": func(s *stand) {
			hangs := make(chan struct{})
			s.row.observe = func() { <-hangs }
			for n := 0; n < 10; {
				if d := s.allows(hot); d.Prefetched && s.kept() > 0 {
					n++
				}
			}
			close(hangs)
		},
		// If a caller gives up, the other callers still get an answer.
		"IsLeftByOne": func(s *stand) {
			s.warm(hot, 0)
			s.row.change(func() { s.row.before = aSecond })
			gone := make(chan error)
			go func() { gone <- s.takeFor(time.Millisecond) }()
			s.allows(hot)
			require.ErrorIs(s, <-gone, context.DeadlineExceeded)
		},
		// When all callers have given up, or after Config.Timeout, the fetch is cancelled.
		"IsLeftByAll": func(s *stand) {
			s.warm(hot, 0)
			s.row.change(func() { s.row.before = aSecond })
			began := time.Now()
			require.ErrorIs(s, s.takeFor(time.Millisecond), context.DeadlineExceeded)
			require.Equal(s, time.Millisecond, time.Since(began))
			synctest.Wait()
			require.Zero(s, s.running)

			s.row.change(func() { s.row.before = func(ctx context.Context, _ float64) error { <-ctx.Done(); return ctx.Err() } })
			began = time.Now()
			require.ErrorIs(s, s.takeFor(time.Hour), context.DeadlineExceeded)
			require.Equal(s, time.Minute, time.Since(began))
		},
		// Prefetched tokens expire after a while, however many are left.
		"EndsAfterAWhile": func(s *stand) {
			fast := tokenBucket("fast", 100, time.Second, 10_000, time.Second)
			s.warm(fast.ask("hot", 1), 100)
			s.timer.Stop() // as in a process that stood still
			pass(time.Second)
			s.row.change(func() { s.row.asked = nil })
			s.allows(fast.ask("hot", 1))
			require.Len(s, s.row.asked, 1)
			s.end(s.T)
			// Close gives back the old tokens and the new ones concurrently, in any order.
			slices.SortFunc(s.row.given, func(a, b bucket.Ahead) int { return cmp.Compare(a.TS, b.TS) })
			require.InDelta(s, 100, s.row.given[0].Left, 0)
		},
		// The prefetched tokens of a window end with it. Tokens left then are lost; before the end they are returned.
		"EndsWithTheWindow": func(s *stand) {
			window, end := tenSeconds()
			s.warm(window.ask("hot", 1), 100)
			s.timer.Stop()
			pass(time.Until(end) - 100*time.Millisecond)
			d := s.allows(window.ask("hot", 1))
			require.True(s, d.Prefetched)
			require.LessOrEqual(s, d.FullAfter, 100*time.Millisecond, "all arrives with the next window")
			pass(time.Until(end))
			s.row.change(func() { s.row.asked = nil })
			s.allows(window.ask("hot", 1))
			require.Len(s, s.row.asked, 1)
			require.InDelta(s, 10_000-s.row.asked[0], s.row.row.Value, 0, "the next window has all its tokens")
			s.end(s.T)
			require.InDelta(s, 99, s.row.changed.Lost, 0)
			require.InDelta(s, 10_000-1, s.row.row.Value, 0)
		},
		"IsGivenBackInItsWindow": func(s *stand) {
			window, end := tenSeconds()
			s.warm(window.ask("hot", 1), 100)
			before := s.row.held()
			pass(time.Until(end) - time.Millisecond)
			require.Zero(s, s.kept())
			require.InDelta(s, before+100, s.row.row.Value, 0)
			require.Zero(s, s.row.changed.Lost)
		},
		"IsLostWithAnotherPolicyOfWindows": func(s *stand) {
			window, end := tenSeconds()
			s.warm(window.ask("hot", 1), 100)
			before := s.row.held()
			s.allows(fixedWindow("window", 20_000, 10*time.Second, 20_000, end, 10*time.Second).ask("hot", 1))
			s.end(s.T)
			require.InDelta(s, 100, s.row.changed.Lost, 0)
			require.LessOrEqual(s, s.row.row.Value, before)
		},
		// If a process has too many keys, calls for new keys go to the database.
		"IsBounded": func(s *stand) {
			s.count.Store(maxHoldings)
			for range 20 {
				require.False(s, s.allows(hot).Prefetched)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				row := newLedger()
				s := &stand{t, row.on(Options{Timeout: time.Minute}), row}
				story(s)
				s.end(t)
			})
		})
	}
}

// A call over several limits that finds too few prefetched tokens of one limit puts the tokens of the others back.
func TestACallNotAnsweredFromMemoryReturnsPrefetchedTokens(t *testing.T) {
	t.Parallel()
	k := New(nil, Options{})
	asks := []bucket.Ask{still.ask("plenty", 2), still.ask("scarce", 2)}
	kept := func(i int) *holding { return k.stripe(&asks[i].Key).of[asks[i].Key] }
	for i, left := range []float64{5, 1} {
		stripe := k.stripe(&asks[i].Key)
		h := k.holding(stripe, &asks[i])
		h.kept, h.ends = bucket.Ahead{Taken: 5, Left: left, TS: 1}, time.Hour
	}
	k.timer.Stop()
	takes := func() bool {
		_, taken := k.Take(asks, nil)
		return taken
	}
	require.False(t, takes())
	require.Equal(t, []float64{5, 1}, []float64{kept(0).kept.Left, kept(1).kept.Left})
	kept(1).kept.Left = 5
	require.True(t, takes())
	require.Equal(t, []float64{3, 3}, []float64{kept(0).kept.Left, kept(1).kept.Left})
}

// Prefetched tokens are used until the end of their time, and given back from then on.
func TestPrefetchedTokensEndOnTime(t *testing.T) {
	t.Parallel()
	h := &holding{kept: bucket.Ahead{Taken: 10, Left: 1}, ends: time.Second, usedAt: time.Second}
	require.True(t, h.has(1, time.Second-1))
	require.False(t, h.has(1, time.Second))
	require.False(t, h.isLeft(time.Second-1, time.Hour))
	require.True(t, h.isLeft(time.Second, time.Hour))
}

func TestPace(t *testing.T) {
	t.Parallel()
	terms := bucket.Terms{Kind: bucket.Steps{}, Capacity: 800, Rate: 1, Steps: 1e6, Step: 1, Prefetch: 8000}
	var p pace
	for _, step := range []struct {
		gap  int64
		size pace
	}{{5000, 0}, {999, 2}, {999, 4}, {1000, 4}, {4000, 4}, {4001, 2}, {0, 4}, {0, 8}, {0, 16}, {0, 32}, {0, 64}, {0, 100}, {0, 100}} {
		p.next(&terms, step.gap, 2)
		require.Equal(t, step.size, p, "after %d", step.gap)
	}
	require.InDelta(t, 100, p.ahead(800, 2, 2), 0)
	require.InDelta(t, 25, p.ahead(102, 2, 2), 0, "a share of what there is")
	require.Zero(t, p.ahead(9, 2, 2), "no more than asked")
	require.Zero(t, p.ahead(-50, 2, 2))
}
