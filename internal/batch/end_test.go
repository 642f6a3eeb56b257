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

// partly is a decider that answers some calls of a batch long before the others.
type partly struct{ *simulation }

func (w partly) Run(ctx context.Context, calls []*job, waitFor *bucket.Key) []Blocked[job] {
	if len(calls) == 1 {
		return w.simulation.Run(ctx, calls, waitFor)
	}
	calls[0].Answer(nil)
	return w.simulation.Run(ctx, calls[1:], waitFor)
}

func TestCloseWaitsForThoseWhoAreIn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, apart := range []bool{false, true} {
			w := newSimulation(t, 10)
			w.options.Apart = func() bool { return apart }
			first := w.ask(time.Second, "a")
			var second *pending
			if !apart {
				second = w.ask(time.Second, "a")
			}
			ended, cancel := context.WithCancel(t.Context())
			cancel()
			require.ErrorIs(t, w.Close(ended), context.Canceled)
			refused := w.ask(time.Second, "b")
			refused.requireFails(errClosed)
			require.NoError(t, w.Close(t.Context()))
			first.requireAnswered(time.Second)
			if second != nil {
				second.requireAnswered(2 * time.Second)
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

func TestTheTimeForACallEndsItWhereverItWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const timeout = time.Second
		w := newSimulation(t, 100)
		w.options.Timeout = timeout
		release := w.hold("held")
		solo := w.make(t.Context(), &job{deaf: true, lasts: 2 * timeout}, "a")
		soonest, cancel := context.WithTimeout(t.Context(), timeout/2)
		defer cancel()
		sooner := w.askIn(soonest, time.Hour, "a")
		over := map[string]*pending{
			"behind a batch":       w.ask(time.Hour, "a"),
			"behind a held row":    w.ask(time.Hour, "held"),
			"behind both":          w.ask(time.Hour, "a", "held"),
			"for the held row too": w.ask(time.Hour, "held"),
		}
		time.Sleep(timeout / 4)
		quick := w.ask(time.Millisecond, "b")
		quick.requireAnswered(time.Millisecond)
		second := w.make(t.Context(), &job{deaf: true, lasts: 3 * timeout}, "c")
		over["in the queue"] = w.ask(time.Hour, "c")
		sooner.requireFails(context.DeadlineExceeded)
		require.Equal(t, timeout/2, sooner.took)
		for where, p := range over {
			<-p.ended
			require.ErrorIs(t, p.err, context.DeadlineExceeded, where)
			require.GreaterOrEqual(t, p.took, timeout, where)
			require.LessOrEqual(t, p.took, timeout+timeout/sweepsPerTimeout, where)
		}
		solo.requireAnswered(2 * timeout)
		second.requireAnswered(3 * timeout)
		release()
		time.Sleep(time.Minute)
		w.requireEmpty()
		next := w.ask(time.Millisecond, "a") // finds nothing of the others' answers
		next.requireAnswered(time.Millisecond)
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
					p := w.askIn(ctx, time.Hour, "a")
					p.requireFails(context.DeadlineExceeded)
					require.NotErrorIs(t, p.err, context.Canceled, "reports would count it as cancelled by its caller")
					require.GreaterOrEqual(t, p.took, test.took)
					require.LessOrEqual(t, p.took, test.took+time.Second/sweepsPerTimeout)
					time.Sleep(time.Minute)
					require.Zero(t, w.batches)
					w.ask(time.Millisecond, "a").requireAnswered(time.Millisecond)
				})
			})
		}
	}
}

func TestCallsThatEnd(t *testing.T) {
	t.Parallel()
	play(t, map[string]func(w *simulation){
		"ACallerWhoGivesUpHarmsNobodyInItsBatch": func(w *simulation) {
			w.ask(time.Millisecond, "a")
			ctx, cancel := context.WithTimeout(w.t.Context(), 10*time.Millisecond)
			defer cancel()
			impatient := w.askIn(ctx, time.Second, "a") // the batch carries on its context's values, and only these
			patient := w.ask(time.Second, "a")
			behind := w.ask(time.Second, "a")
			impatient.requireFails(context.DeadlineExceeded)
			require.Equal(w.t, 10*time.Millisecond, impatient.took)
			behind.cancel()
			patient.requireAnswered(time.Second + time.Millisecond)
			require.Equal(w.t, []int{1, 3}, w.sizes)
		},
		"ABatchThatNobodyWaitsForIsCancelled": func(w *simulation) {
			w.ask(time.Millisecond, "a")
			inBatch := []*pending{w.ask(time.Hour, "a"), w.ask(time.Hour, "b", "a"), w.ask(time.Hour, "a")}
			next := w.ask(time.Millisecond, "c")
			next.requireAnswered(time.Millisecond)
			for _, p := range inBatch {
				p.requireWaits()
				p.cancel()
			}
			w.requireEmpty()
			alone := w.ask(time.Hour, "a")
			alone.cancel()
		},
		"ABatchThatNobodyWaitsForWhenItLeavesIsCancelledThen": func(w *simulation) {
			ctx, cancel := context.WithCancel(w.t.Context())
			c := &call{Of: &job{lasts: time.Hour}, ctx: ctx, done: make(chan struct{}, 1)}
			_, err := w.enqueue(c)
			require.NoError(w.t, err)
			f := w.next(nil, nil)
			cancel()
			require.ErrorIs(w.t, w.wait(ctx, c), context.Canceled)
			left := time.Now()
			w.runAll(f)
			require.Zero(w.t, time.Since(left))
		},
		"ABatchIsCancelledWhenTheLastOfItsUnansweredCallersLeaves": func(w *simulation) {
			w.decider = partly{w}
			w.ask(time.Millisecond, "a")
			answered, second, third := w.ask(0, "a"), w.ask(time.Hour, "a"), w.ask(time.Hour, "a")
			answered.requireAnswered(time.Millisecond)
			second.cancel()
			third.requireWaits()
			third.cancel()
		},
		"AnAnswerThatIsThereIsGivenToACallerWhoseContextEnds": func(w *simulation) {
			for range 100 {
				c := &call{Of: &job{}, done: make(chan struct{}, 1)}
				_, err := w.enqueue(c)
				require.NoError(w.t, err)
				f := w.next(nil, nil)
				c.Answer(nil)
				c.Answer(context.Canceled) // a call is answered only once
				ctx, cancel := context.WithCancel(w.t.Context())
				cancel()
				require.NoError(w.t, w.wait(ctx, c))
				require.Nil(w.t, w.next(f, nil))
			}
		},
		"MaxWaitingBoundsThoseWhoWait": func(w *simulation) {
			const most = 5
			w.options.MaxWaiting = most
			w.ask(time.Second, "hot")
			var waiting []*pending
			for range most {
				waiting = append(waiting, w.ask(time.Millisecond, "hot"))
			}
			w.ask(time.Millisecond, "hot").requireRefused(w)
			w.ask(time.Millisecond, "idle").requireAnswered(time.Millisecond) // has not to wait
			waiting[2].cancel()
			w.requireSound()
			instead := w.ask(time.Millisecond, "hot")
			instead.requireWaits()
			w.ask(time.Millisecond, "hot").requireRefused(w)
			instead.requireAnswered(time.Second)
			w.requireEmpty()
			w.ask(time.Millisecond, "hot").requireAnswered(time.Millisecond)
		},
		// Callers of a held row wait in a line of their own, which at most half of MaxWaiting join: they cost callers of free rows no place.
		"CallersOfAHeldRowLeaveTheQueueToOthers": func(w *simulation) {
			const most = 20
			w.options.MaxWaiting = most
			hold := func(key string) (release func(), line []*pending) {
				release = w.hold(key)
				w.ask(time.Millisecond, key)
				time.Sleep(wideSlowAfter) // its batch is slow
				for range most / 2 {
					line = append(line, w.ask(time.Millisecond, key))
				}
				w.ask(time.Millisecond, key).requireRefused(w)
				return release, line
			}
			releaseFirst, first := hold("first")
			releaseSecond, second := hold("second")
			w.ask(5*time.Millisecond, "busy")
			w.ask(5*time.Millisecond, "busy as well")
			var free []*pending
			for range most {
				free = append(free, w.ask(time.Millisecond, "free"))
			}
			w.ask(time.Millisecond, "free").requireRefused(w)
			for _, p := range free {
				p.requireAnswered(6 * time.Millisecond)
			}
			for _, p := range append(first, second...) {
				p.requireWaits()
			}
			releaseFirst()
			releaseSecond()
			for _, p := range append(first, second...) {
				<-p.ended
				require.NoError(w.t, p.err)
			}
		},
		"TheQueueForgetsCallsThatWereGivenUp": func(w *simulation) {
			w.options.MaxWaiting = 1000
			w.ask(time.Second, "hot")
			var waiting []*pending
			for range 1000 {
				waiting = append(waiting, w.ask(time.Millisecond, "hot"))
			}
			for i, p := range waiting {
				if i%100 != 0 {
					p.cancel()
				}
			}
			w.requireSound() // its bound on the length of the queue
			for i := 0; i < len(waiting); i += 100 {
				waiting[i].requireAnswered(time.Second + time.Millisecond)
			}
		},
		// What a hook of the application's panics with goes on in the callers, as without batches, and stays there.
		"APanicReachesItsCallersAndNobodyElse": func(w *simulation) {
			crash := func() { panic("out of fuel") }
			first := w.make(w.t.Context(), &job{lasts: time.Second, crash: crash}, "a")
			second := w.make(w.t.Context(), &job{lasts: time.Second, crash: crash}, "a")
			with := w.ask(time.Second, "a")
			first.requirePanics("out of fuel")
			behind := w.ask(time.Second, "a")
			for _, p := range []*pending{second, with} {
				p.requirePanics("out of fuel")
				require.Contains(w.t, p.panics, "end_test.go", "where it came from")
			}
			behind.requireAnswered(2 * time.Second)
			w.requireEmpty()
			require.NoError(w.t, w.Close(w.t.Context()))
		},
		"AHookThatExitsItsGoroutineFailsTheCallsOfTheBatch": func(w *simulation) {
			w.ask(time.Second, "a")
			exits := w.make(w.t.Context(), &job{lasts: time.Second, crash: runtime.Goexit}, "a")
			with := w.ask(time.Second, "a")
			time.Sleep(1500 * time.Millisecond)
			behind := w.ask(time.Second, "a")
			for _, p := range []*pending{exits, with} {
				p.requireFails(errAbandoned)
			}
			behind.requireAnswered(1500 * time.Millisecond)
		},
		// A call that is apart waits for a held row on the goroutine of its caller. When the caller has its answer, nothing is left that could use its
		// connection.
		"ACallApartStaysOnItsGoroutine": func(w *simulation) {
			w.options.Timeout, w.options.Apart = time.Second, func() bool { return true }
			release := w.hold("a")
			for _, keys := range [][]string{{"a"}, {"a", "b"}} {
				late := w.ask(time.Millisecond, keys...)
				late.requireFails(context.DeadlineExceeded)
				require.LessOrEqual(w.t, late.took, time.Second+time.Second/sweepsPerTimeout)
				require.Zero(w.t, w.batches)
			}
			patient := w.ask(time.Millisecond, "a", "b")
			time.Sleep(time.Second / 2)
			patient.requireWaits()
			release()
			patient.requireAnswered(time.Second/2 + time.Millisecond)
			require.Zero(w.t, w.batches)
		},
		"ACallThatPanicsWhenItsTimeIsOverLeavesNoAnswerToOthers": func(w *simulation) {
			w.options.Timeout = time.Second
			p := w.make(w.t.Context(), &job{deaf: true, lasts: 2 * time.Second, crash: func() { panic("out of fuel") }}, "a")
			p.requirePanics("out of fuel")
			for range 20 {
				w.ask(time.Millisecond, "a").requireAnswered(time.Millisecond)
			}
			require.Empty(w.t, p.done)
		},
	})
}
