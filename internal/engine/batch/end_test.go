package batch

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
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

func TestCallsThatEnd(t *testing.T) {
	t.Parallel()
	play(t, map[string]func(w *simulation){
		"CloseWaitsForThoseWhoAreIn": func(w *simulation) {
			for _, apart := range []bool{false, true} {
				w := newSimulation(w.t, 10)
				w.options.Apart = func() bool { return apart }
				first := w.ask(time.Second, "a")
				var second *pending
				if !apart {
					second = w.ask(time.Second, "a")
				}
				ended, cancel := context.WithCancel(w.t.Context())
				cancel()
				require.ErrorIs(w.t, w.Close(ended), context.Canceled)
				refused := w.ask(time.Second, "b")
				refused.requireFails(errClosed)
				require.NoError(w.t, w.Close(w.t.Context()))
				first.requireAnswered(time.Second)
				if second != nil {
					second.requireAnswered(2 * time.Second)
				}
				require.NoError(w.t, w.Close(w.t.Context()))
				for range 20 { // a finished call stays finished, also if its context ends
					require.NoError(w.t, w.Close(ended))
				}
				require.Zero(w.t, w.batches)
			}
			require.NoError(w.t, newSimulation(w.t, 10).Close(w.t.Context()))
		},
		"TheTimeForACallEndsItWhereverItWaits": func(w *simulation) {
			const timeout = time.Second
			w.options.MaxWaiting = 100
			w.options.Timeout = timeout
			release := w.hold("held")
			solo := w.make(w.t.Context(), &job{deaf: true, lasts: 2 * timeout}, "a")
			soonest, cancel := context.WithTimeout(w.t.Context(), timeout/2)
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
			second := w.make(w.t.Context(), &job{deaf: true, lasts: 3 * timeout}, "c")
			over["in the queue"] = w.ask(time.Hour, "c")
			sooner.requireFails(context.DeadlineExceeded)
			require.Equal(w.t, timeout/2, sooner.took)
			for where, p := range over {
				<-p.ended
				require.ErrorIs(w.t, p.err, context.DeadlineExceeded, where)
				require.GreaterOrEqual(w.t, p.took, timeout, where)
				require.LessOrEqual(w.t, p.took, timeout+timeout/sweepsPerTimeout, where)
			}
			solo.requireAnswered(2 * timeout)
			second.requireAnswered(3 * timeout)
			release()
			time.Sleep(time.Minute)
			w.requireEmpty()
			next := w.ask(time.Millisecond, "a") // finds nothing of the others' answers
			next.requireAnswered(time.Millisecond)
		},
		// The time for a call that is answered by itself ends it, or its context, if that ends sooner.
		"TheTimeForACallByItselfEndsIt": func(w *simulation) {
			for _, test := range []struct{ timeout, context, took time.Duration }{
				{timeout: time.Second, context: time.Minute, took: time.Second},
				{timeout: time.Minute, context: time.Second, took: time.Second},
				{timeout: -1, context: time.Minute, took: time.Minute},
			} {
				for _, apart := range []bool{false, true} {
					w := newSimulation(w.t, 10)
					w.options.Timeout, w.options.Apart = test.timeout, func() bool { return apart }
					ctx, cancel := context.WithTimeout(w.t.Context(), test.context)
					defer cancel()
					p := w.askIn(ctx, time.Hour, "a")
					p.requireFails(context.DeadlineExceeded)
					require.NotErrorIs(w.t, p.err, context.Canceled, "reports would count it as cancelled by its caller")
					require.GreaterOrEqual(w.t, p.took, test.took, "%+v", test)
					require.LessOrEqual(w.t, p.took, test.took+time.Second/sweepsPerTimeout, "%+v", test)
					time.Sleep(time.Minute)
					require.Zero(w.t, w.batches)
					w.ask(time.Millisecond, "a").requireAnswered(time.Millisecond)
				}
			}
		},
		// The time for a call ends it as its context does: before the claim at once, and after it with what ended the batch.
		"TheTimeForACallThatIsAwaitedEndsIt": func(w *simulation) {
			for _, timeout := range []time.Duration{500 * time.Millisecond, 1500 * time.Millisecond, 2500 * time.Millisecond} {
				w := newSimulation(w.t, 10)
				w.options.Timeout = timeout
				for _, p := range w.reserveTogether(2) { // in the queue, before the claim, and after it
					p.requireFails(context.DeadlineExceeded)
					require.Equal(w.t, timeout, p.took)
				}
				time.Sleep(time.Minute)
			}
		},
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
		// Callers of a held row wait in a line of their own, which at most half of MaxWaiting join: they cost callers of free
		// rows no place.
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
				p.requireFails(ErrAbandoned)
			}
			behind.requireAnswered(1500 * time.Millisecond)
		},
		"AHookThatExitsTheGoroutineOfACallerLeavesNoAnswerToOthers": func(w *simulation) {
			for range 20 {
				<-w.make(w.t.Context(), &job{lasts: time.Millisecond, crash: runtime.Goexit}, "a").ended
				w.ask(time.Millisecond, "a").requireAnswered(time.Millisecond)
			}
		},
		"CloseWaitsForWhatHasBegun": func(w *simulation) {
			require.True(w.t, w.Begin())
			closed := make(chan error, 1)
			go func() { closed <- w.Close(w.t.Context()) }()
			synctest.Wait()
			require.Empty(w.t, closed)
			require.False(w.t, w.Begin())
			w.End()
			require.NoError(w.t, <-closed)
		},
		"ACallApartWaitsForAHeldRow": func(w *simulation) {
			w.options.Timeout, w.options.Apart = time.Second, func() bool { return true }
			release := w.hold("a")
			for _, keys := range [][]string{{"a"}, {"a", "b"}} {
				late := w.ask(time.Millisecond, keys...)
				late.requireFails(context.DeadlineExceeded)
				require.LessOrEqual(w.t, late.took, time.Second+time.Second/sweepsPerTimeout)
			}
			patient := w.ask(time.Millisecond, "a", "b")
			time.Sleep(time.Second / 2)
			patient.requireWaits()
			release()
			patient.requireAnswered(time.Second/2 + time.Millisecond)
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

// reserve makes a call that is Awaited: it is claimed after a second, and written after another.
func (w *simulation) reserve() *pending {
	return w.make(w.t.Context(), &job{writes: time.Second, lasts: time.Second}, "a")
}

// reserveTogether makes n such calls for one key that are a batch, which begins a second after the first.
func (w *simulation) reserveTogether(n int) (together []*pending) {
	w.ask(time.Second, "a")
	for range n {
		together = append(together, w.reserve())
	}
	return together
}

// freed counts how often a call was given back.
type freed int

func (f *freed) Free() { *f++ }

// askOwned makes a call whose owner counts how often he gets it back.
func (w *simulation) askOwned(crash func(), keys ...string) (*pending, *freed) {
	owner, j := new(freed), &job{lasts: time.Millisecond, crash: crash}
	j.Owner = owner
	return w.make(w.t.Context(), j, keys...), owner
}

// lone is a call that runs a function with its context.
type lone struct {
	Call[lone]

	decide func(ctx context.Context)
}

// deciding runs the function of each call.
type deciding struct{}

func (deciding) Run(ctx context.Context, calls []*lone, _ *bucket.Key) []Blocked[lone] {
	for _, c := range calls {
		c.decide(ctx)
		c.Answer(ctx.Err())
	}
	return nil
}

// A call by itself has the values of its caller's context and ends with its cause. Its own context ends with the call.
func TestALoneCallRunsWithTheContextOfItsCaller(t *testing.T) {
	t.Parallel()
	type key struct{}
	why := errors.New("the caller hung up")
	synctest.Test(t, func(t *testing.T) {
		for n := range 40 {
			b := New[lone](deciding{}, Options{Apart: func() bool { return n%2 == 0 }, MaxWaiting: 10, Timeout: time.Second})
			do := func(ctx context.Context, decide func(ctx context.Context)) error {
				c := &lone{decide: decide}
				c.Of = c
				return b.Do(ctx, &c.Call)
			}
			ctx, cancel := context.WithCancelCause(context.WithValue(t.Context(), key{}, n))
			var kept context.Context
			for range 2 {
				require.NoError(t, do(ctx, func(ctx context.Context) {
					require.Equal(t, n, ctx.Value(key{}))
					time.Sleep(900 * time.Millisecond) // the time of the call before ends nothing
					kept = ctx
				}))
				require.Error(t, kept.Err())
			}
			time.AfterFunc(time.Millisecond, func() { cancel(why) })
			require.ErrorIs(t, do(ctx, func(ctx context.Context) {
				<-ctx.Done()
				require.Equal(t, why, context.Cause(ctx))
			}), context.Canceled)
		}
	})
}

func TestCallsThatAreClaimed(t *testing.T) {
	t.Parallel()
	play(t, map[string]func(w *simulation){
		"ACallerWhoGivesUpBeforeTheClaimLeaves": func(w *simulation) {
			calls := w.reserveTogether(3)
			calls[0].cancel()
			calls[0].requireFails(context.Canceled)
			time.Sleep(1500 * time.Millisecond) // the batch is in progress
			calls[1].cancel()
			calls[1].requireFails(context.Canceled)
			require.Equal(w.t, 1500*time.Millisecond, calls[1].took)
			calls[2].requireAnswered(3 * time.Second)
			require.Equal(w.t, []bool{false, false, true}, []bool{calls[0].Of.claimed, calls[1].Of.claimed, calls[2].Of.claimed})
		},
		"ACallerWhoGivesUpAfterTheClaimHearsOfIt": func(w *simulation) {
			calls := w.reserveTogether(2)
			behind := w.ask(time.Second, "a")
			time.Sleep(2500 * time.Millisecond)
			calls[0].cancel()
			calls[0].requireWaits()
			calls[0].requireAnswered(3 * time.Second)
			calls[1].requireAnswered(3 * time.Second)
			behind.requireAnswered(3 * time.Second) // it was in their batch
		},
		// If all callers of a batch have given up, the batch is cancelled, for example if its connection hangs.
		"ABatchWhoseCallersHaveAllGivenUpIsCancelled": func(w *simulation) {
			calls := w.reserveTogether(2)
			calls = append(calls, w.ask(time.Second, "a"))
			time.Sleep(2500 * time.Millisecond)
			for _, p := range calls {
				p.requireWaits()
				p.cancel()
			}
			for _, p := range calls {
				p.requireFails(context.Canceled)
				require.Equal(w.t, 2500*time.Millisecond, p.took)
			}
			w.reserve().requireAnswered(2 * time.Second)
		},
		// A claimed call that then finds its row locked waits like any other.
		"ACallThatWaitsAfterTheClaimCanBeLeft": func(w *simulation) {
			w.ask(time.Second, "a")
			var calls []*pending
			for range 3 {
				calls = append(calls, w.make(w.t.Context(), &job{writes: time.Second, held: "b", lasts: time.Second}, "a", "b"))
			}
			time.Sleep(2500 * time.Millisecond)
			release := w.hold("b")
			calls[0].cancel()
			calls[0].requireWaits() // it was claimed
			time.Sleep(time.Second)
			calls[0].requireFails(context.Canceled)
			require.Equal(w.t, 3*time.Second, calls[0].took)
			calls[1].cancel() // by now it waits for the row
			calls[1].requireFails(context.Canceled)
			require.Equal(w.t, 3500*time.Millisecond, calls[1].took)
			release()
			calls[2].requireAnswered(5500 * time.Millisecond)
		},
		// A panic of a hook after the claim also reaches callers who have given up.
		"APanicReachesThoseWhoHaveGivenUp": func(w *simulation) {
			w.ask(time.Second, "a")
			crash := func() { panic("out of fuel") }
			early := w.make(w.t.Context(), &job{writes: time.Second, lasts: time.Second, crash: crash}, "a")
			with := w.reserve()
			time.Sleep(2500 * time.Millisecond)
			early.cancel()
			early.requireWaits()
			for _, p := range []*pending{early, with} {
				p.requirePanics("out of fuel")
			}
			w.reserve().requireAnswered(2 * time.Second)
		},
		// A call is given back once, after its caller and all of its batches are done with it.
		"ACallIsGivenBackOnce": func(w *simulation) {
			release := w.hold("b")
			w.ask(time.Millisecond, "a")
			inTwo, ofTwo := w.askOwned(nil, "a", "b")
			other, ofOther := w.askOwned(nil, "a")
			other.requireAnswered(2 * time.Millisecond)
			inTwo.requireWaits()
			release()
			<-inTwo.ended
			require.NoError(w.t, inTwo.err)
			require.Zero(w.t, *ofTwo+*ofOther, "their callers have not said that they are done with them")
			inTwo.Done()
			other.Done()
			synctest.Wait()
			require.Equal(w.t, []freed{1, 1}, []freed{*ofTwo, *ofOther})
		},
		// A call whose caller left, or whose batch panicked, is not given back: its batch may still read it.
		"ACallIsKeptThatABatchMayRead": func(w *simulation) {
			alone := w.ask(time.Millisecond, "a")
			left, ofLeft := w.askOwned(nil, "a")
			leaves, ofLeaves := w.askOwned(nil, "a")
			left.cancel()
			alone.requireAnswered(time.Millisecond)
			leaves.cancel()
			<-leaves.ended
			w.ask(time.Millisecond, "b")
			crashes, ofCrash := w.askOwned(func() { panic("a hook") }, "b")
			crashes.requirePanics("a hook")
			time.Sleep(time.Minute)
			require.Zero(w.t, *ofLeft+*ofLeaves+*ofCrash)
		},
	})
}
