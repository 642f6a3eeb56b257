package batch

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

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

// The time for a call ends it as its context does: before the claim at once, and after it with what ended the batch.
func TestTheTimeForACallThatIsAwaitedEndsIt(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ timeout, took time.Duration }{
		"InTheQueue":     {timeout: 500 * time.Millisecond, took: 500 * time.Millisecond},
		"BeforeTheClaim": {timeout: 1500 * time.Millisecond, took: 1500 * time.Millisecond},
		"AfterTheClaim":  {timeout: 2500 * time.Millisecond, took: 2500 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newSimulation(t, 10)
				w.options.Timeout = c.timeout
				for _, p := range w.reserveTogether(2) {
					p.requireFails(context.DeadlineExceeded)
					require.Equal(t, c.took, p.took)
				}
				time.Sleep(time.Minute)
			})
		})
	}
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
	for _, apart := range []bool{false, true} {
		t.Run(fmt.Sprint("apart ", apart), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b := New[lone](deciding{}, Options{Apart: func() bool { return apart }, MaxWaiting: 10, Timeout: time.Second})
				do := func(ctx context.Context, decide func(ctx context.Context)) error {
					c := &lone{decide: decide}
					c.Of = c
					return b.Do(ctx, &c.Call)
				}
				for n := range 20 {
					ctx, cancel := context.WithCancelCause(context.WithValue(t.Context(), key{}, n))
					var kept context.Context
					require.NoError(t, do(ctx, func(ctx context.Context) {
						require.Equal(t, n, ctx.Value(key{}))
						time.Sleep(900 * time.Millisecond) // the time of the call before ends nothing
						kept = ctx
					}))
					require.Error(t, kept.Err())

					time.AfterFunc(time.Millisecond, func() { cancel(why) })
					require.ErrorIs(t, do(ctx, func(ctx context.Context) {
						<-ctx.Done()
						require.Equal(t, why, context.Cause(ctx))
					}), context.Canceled)
				}
			})
		})
	}
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
