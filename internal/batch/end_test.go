package batch

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

func TestACallThatIsGivenUpIsOutOfTheWay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSimulation(t, 10)
		held := w.ask(t.Context(), time.Second, "a")
		both := w.ask(t.Context(), time.Millisecond, "a", "b")
		behind := w.ask(t.Context(), time.Millisecond, "b")
		time.Sleep(5 * time.Millisecond)
		behind.requireWaits(t)
		both.cancel()
		behind.requireAnswered(t, 6*time.Millisecond)
		both.requireFails(t, context.Canceled)
		require.Equal(t, 5*time.Millisecond, both.took)
		require.Zero(t, w.started[both.call])
		w.ask(t.Context(), time.Millisecond, "b").requireAnswered(t, time.Millisecond)
		held.requireAnswered(t, time.Second)
	})
}

func TestACallerWhoGivesUpHarmsNobodyInItsBatch(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSimulation(t, 10)
		w.ask(t.Context(), time.Millisecond, "a")
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		impatient := w.ask(ctx, time.Second, "a") // the batch carries on its context's values, and only these
		patient := w.ask(t.Context(), time.Second, "a")
		behind := w.ask(t.Context(), time.Second, "a")
		impatient.requireFails(t, context.DeadlineExceeded)
		require.Equal(t, 10*time.Millisecond, impatient.took)
		behind.cancel()
		patient.requireAnswered(t, time.Second+time.Millisecond)
		require.Equal(t, []int{1, 3}, w.sizes)
	})
}

func TestABatchThatNobodyWaitsForIsCancelled(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSimulation(t, 10)
		w.ask(t.Context(), time.Millisecond, "a")
		inBatch := []*pending{w.ask(t.Context(), time.Hour, "a"), w.ask(t.Context(), time.Hour, "b", "a"), w.ask(t.Context(), time.Hour, "a")}
		next := w.ask(t.Context(), time.Millisecond, "c")
		next.requireAnswered(t, time.Millisecond)
		for _, p := range inBatch {
			p.requireWaits(t)
			p.cancel()
		}
		w.requireEmpty()
		alone := w.ask(t.Context(), time.Hour, "a")
		alone.cancel()
	})
}

func TestABatchThatNobodyWaitsForWhenItLeavesIsCancelledThen(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSimulation(t, 10)
		ctx, cancel := context.WithCancel(t.Context())
		c := &call{Of: &job{}, ctx: ctx, done: make(chan struct{}, 1)}
		w.lasts[c] = time.Hour
		_, err := w.enqueue(c)
		require.NoError(t, err)
		f := w.next(nil, nil)
		cancel()
		require.ErrorIs(t, w.wait(ctx, c), context.Canceled)
		left := time.Now()
		w.runAll(f)
		require.Zero(t, time.Since(left))
	})
}

// partly is a decider that answers some calls of a batch long before the others.
type partly struct{ *simulation }

func (w partly) Run(ctx context.Context, calls []*job, waitFor *bucket.Key) []Blocked[job] {
	if len(calls) == 1 {
		return w.simulation.Run(ctx, calls, waitFor)
	}
	calls[0].Answer(nil)
	return w.simulation.Run(ctx, calls[1:], waitFor)
}

func TestABatchIsCancelledWhenTheLastOfItsUnansweredCallersLeaves(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSimulation(t, 10)
		w.decider = partly{w}
		w.ask(t.Context(), time.Millisecond, "a")
		answered, second, third := w.ask(t.Context(), 0, "a"), w.ask(t.Context(), time.Hour, "a"), w.ask(t.Context(), time.Hour, "a")
		answered.requireAnswered(t, time.Millisecond)
		second.cancel()
		third.requireWaits(t)
		third.cancel()
	})
}

func TestAnAnswerThatIsThereIsGivenToACallerWhoseContextEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSimulation(t, 10)
		for range 100 {
			c := &call{Of: &job{}, done: make(chan struct{}, 1)}
			_, err := w.enqueue(c)
			require.NoError(t, err)
			f := w.next(nil, nil)
			c.Answer(nil)
			c.Answer(context.Canceled) // a call is answered only once
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			require.NoError(t, w.wait(ctx, c))
			require.Nil(t, w.next(f, nil))
		}
	})
}

func TestMaxWaitingBoundsThoseWhoWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const most = 5
		w := newSimulation(t, most)
		w.ask(t.Context(), time.Second, "hot")
		var waiting []*pending
		for range most {
			waiting = append(waiting, w.ask(t.Context(), time.Millisecond, "hot"))
		}
		w.ask(t.Context(), time.Millisecond, "hot").requireRefused(t, w)
		w.ask(t.Context(), time.Millisecond, "idle").requireAnswered(t, time.Millisecond) // has not to wait
		waiting[2].cancel()
		w.requireSound()
		instead := w.ask(t.Context(), time.Millisecond, "hot")
		instead.requireWaits(t)
		w.ask(t.Context(), time.Millisecond, "hot").requireRefused(t, w)
		instead.requireAnswered(t, time.Second)
		w.requireEmpty()
		w.ask(t.Context(), time.Millisecond, "hot").requireAnswered(t, time.Millisecond)
	})
}

// Callers of a held row wait in a line of their own, which at most half of MaxWaiting join: they cost callers of free rows no place.
func TestCallersOfAHeldRowLeaveTheQueueToOthers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const most = 20
		w := newSimulation(t, most)
		hold := func(key string) (release func(), line []*pending) {
			release = w.hold(key)
			w.ask(t.Context(), time.Millisecond, key)
			time.Sleep(wideSlowAfter) // its batch is slow
			for range most / 2 {
				line = append(line, w.ask(t.Context(), time.Millisecond, key))
			}
			w.ask(t.Context(), time.Millisecond, key).requireRefused(t, w)
			return release, line
		}
		releaseFirst, first := hold("first")
		releaseSecond, second := hold("second")
		w.ask(t.Context(), 5*time.Millisecond, "busy")
		w.ask(t.Context(), 5*time.Millisecond, "busy as well")
		var free []*pending
		for range most {
			free = append(free, w.ask(t.Context(), time.Millisecond, "free"))
		}
		w.ask(t.Context(), time.Millisecond, "free").requireRefused(t, w)
		for _, p := range free {
			p.requireAnswered(t, 6*time.Millisecond)
		}
		for _, p := range append(first, second...) {
			p.requireWaits(t)
		}
		releaseFirst()
		releaseSecond()
		for _, p := range append(first, second...) {
			<-p.ended
			require.NoError(t, p.err)
		}
	})
}

func TestTheQueueForgetsCallsThatWereGivenUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSimulation(t, 1000)
		w.ask(t.Context(), time.Second, "hot")
		var waiting []*pending
		for range 1000 {
			waiting = append(waiting, w.ask(t.Context(), time.Millisecond, "hot"))
		}
		for i, p := range waiting {
			if i%100 != 0 {
				p.cancel()
			}
		}
		w.requireSound() // its bound on the length of the queue
		for i := 0; i < len(waiting); i += 100 {
			waiting[i].requireAnswered(t, time.Second+time.Millisecond)
		}
	})
}

func TestCloseWaitsForThoseWhoAreIn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, apart := range []bool{false, true} {
			w := newSimulation(t, 10)
			w.options.Apart = func() bool { return apart }
			first := w.ask(t.Context(), time.Second, "a")
			var second *pending
			if !apart {
				second = w.ask(t.Context(), time.Second, "a")
			}
			ended, cancel := context.WithCancel(t.Context())
			cancel()
			require.ErrorIs(t, w.Close(ended), context.Canceled)
			refused := w.ask(t.Context(), time.Second, "b")
			refused.requireFails(t, errClosed)
			require.NoError(t, w.Close(t.Context()))
			first.requireAnswered(t, time.Second)
			if second != nil {
				second.requireAnswered(t, 2*time.Second)
			}
			require.NoError(t, w.Close(t.Context()))
			for range 20 { // a finished call stays finished, also if its context ends
				require.NoError(t, w.Close(ended))
			}
			require.Zero(t, w.batches)
		}
		require.NoError(t, newSimulation(t, 10).Close(t.Context()))
	})
}

// What a hook of the application's panics with goes on in the callers, as without batches, and stays there.
func TestAPanicReachesItsCallersAndNobodyElse(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSimulation(t, 10)
		crash := func() { panic("out of fuel") }
		first := w.make(t.Context(), &job{}, time.Second, crash, "a")
		second := w.make(t.Context(), &job{}, time.Second, crash, "a")
		with := w.ask(t.Context(), time.Second, "a")
		first.requirePanics(t, "out of fuel")
		behind := w.ask(t.Context(), time.Second, "a")
		for _, p := range []*pending{second, with} {
			p.requirePanics(t, "out of fuel")
			require.Contains(t, p.panics, "end_test.go", "where it came from")
		}
		behind.requireAnswered(t, 2*time.Second)
		w.requireEmpty()
		require.NoError(t, w.Close(t.Context()))
	})
}

func TestAHookThatExitsItsGoroutineFailsTheCallsOfTheBatch(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSimulation(t, 10)
		w.ask(t.Context(), time.Second, "a")
		exits := w.make(t.Context(), &job{}, time.Second, runtime.Goexit, "a")
		with := w.ask(t.Context(), time.Second, "a")
		time.Sleep(1500 * time.Millisecond)
		behind := w.ask(t.Context(), time.Second, "a")
		for _, p := range []*pending{exits, with} {
			p.requireFails(t, errAbandoned)
		}
		behind.requireAnswered(t, 1500*time.Millisecond)
	})
}

func TestTheTimeForACallEndsItWhereverItWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const timeout = time.Second
		w := newSimulation(t, 100)
		w.options.Timeout = timeout
		release := w.hold("held")
		solo := w.make(t.Context(), &job{deaf: true}, 2*timeout, nil, "a")
		soonest, cancel := context.WithTimeout(t.Context(), timeout/2)
		defer cancel()
		sooner := w.ask(soonest, time.Hour, "a")
		over := map[string]*pending{
			"behind a batch":       w.ask(t.Context(), time.Hour, "a"),
			"behind a held row":    w.ask(t.Context(), time.Hour, "held"),
			"behind both":          w.ask(t.Context(), time.Hour, "a", "held"),
			"for the held row too": w.ask(t.Context(), time.Hour, "held"),
		}
		time.Sleep(timeout / 4)
		quick := w.ask(t.Context(), time.Millisecond, "b")
		quick.requireAnswered(t, time.Millisecond)
		second := w.make(t.Context(), &job{deaf: true}, 3*timeout, nil, "c")
		over["in the queue"] = w.ask(t.Context(), time.Hour, "c")
		sooner.requireFails(t, context.DeadlineExceeded)
		require.Equal(t, timeout/2, sooner.took)
		for where, p := range over {
			<-p.ended
			require.ErrorIs(t, p.err, context.DeadlineExceeded, where)
			require.GreaterOrEqual(t, p.took, timeout, where)
			require.LessOrEqual(t, p.took, timeout+timeout/sweepsPerTimeout, where)
		}
		solo.requireAnswered(t, 2*timeout)
		second.requireAnswered(t, 3*timeout)
		release()
		time.Sleep(time.Minute)
		w.requireEmpty()
		next := w.ask(t.Context(), time.Millisecond, "a") // finds nothing of the others' answers
		next.requireAnswered(t, time.Millisecond)
	})
}

// The time for a call that is answered by itself ends it, or its context, if that ends sooner.
func TestTheTimeForACallByItselfEndsIt(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ timeout, context, took time.Duration }{
		"Timeout":      {timeout: time.Second, context: time.Minute, took: time.Second},
		"ContextFirst": {timeout: time.Minute, context: time.Second, took: time.Second},
		"NoTimeout":    {timeout: -1, context: time.Minute, took: time.Minute},
	} {
		for _, apart := range []bool{false, true} {
			t.Run(fmt.Sprint(name, " apart ", apart), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					w := newSimulation(t, 10)
					w.options.Timeout, w.options.Apart = test.timeout, func() bool { return apart }
					ctx, cancel := context.WithTimeout(t.Context(), test.context)
					defer cancel()
					p := w.ask(ctx, time.Hour, "a")
					p.requireFails(t, context.DeadlineExceeded)
					require.NotErrorIs(t, p.err, context.Canceled, "reports would count it as cancelled by its caller")
					require.GreaterOrEqual(t, p.took, test.took)
					require.LessOrEqual(t, p.took, test.took+time.Second/sweepsPerTimeout)
					time.Sleep(time.Minute)
					require.Zero(t, w.batches)
					w.ask(t.Context(), time.Millisecond, "a").requireAnswered(t, time.Millisecond)
				})
			})
		}
	}
}

// A call that is apart waits for a held row on the goroutine of its caller. When the caller has its answer, nothing is left that could use its
// connection.
func TestACallApartStaysOnItsGoroutine(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSimulation(t, 10)
		w.options.Timeout, w.options.Apart = time.Second, func() bool { return true }
		release := w.hold("a")
		for _, keys := range [][]string{{"a"}, {"a", "b"}} {
			late := w.ask(t.Context(), time.Millisecond, keys...)
			late.requireFails(t, context.DeadlineExceeded)
			require.LessOrEqual(t, late.took, time.Second+time.Second/sweepsPerTimeout)
			require.Zero(t, w.batches)
		}
		patient := w.ask(t.Context(), time.Millisecond, "a", "b")
		time.Sleep(time.Second / 2)
		patient.requireWaits(t)
		release()
		patient.requireAnswered(t, time.Second/2+time.Millisecond)
		require.Zero(t, w.batches)
	})
}

func TestACallThatPanicsWhenItsTimeIsOverLeavesNoAnswerToOthers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSimulation(t, 10)
		w.options.Timeout = time.Second
		p := w.make(t.Context(), &job{deaf: true}, 2*time.Second, func() { panic("out of fuel") }, "a")
		p.requirePanics(t, "out of fuel")
		for range 20 {
			w.ask(t.Context(), time.Millisecond, "a").requireAnswered(t, time.Millisecond)
		}
		require.Empty(t, p.done)
	})
}
