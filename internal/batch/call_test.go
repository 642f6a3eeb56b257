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
func (w *simulation) reserve(ctx context.Context) *pending {
	return w.make(ctx, &job{writes: time.Second}, time.Second, nil, "a")
}

// reserveTogether makes n such calls for one key that are a batch, which begins a second after the first.
func (w *simulation) reserveTogether(n int) (together []*pending) {
	w.ask(w.t.Context(), time.Second, "a")
	for range n {
		together = append(together, w.reserve(w.t.Context()))
	}
	return together
}

func TestACallerWhoGivesUpBeforeTheClaimLeaves(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSimulation(t, 10)
		calls := w.reserveTogether(3)
		calls[0].cancel()
		calls[0].requireFails(t, context.Canceled)
		time.Sleep(1500 * time.Millisecond) // the batch is in progress
		calls[1].cancel()
		calls[1].requireFails(t, context.Canceled)
		require.Equal(t, 1500*time.Millisecond, calls[1].took)
		calls[2].requireAnswered(t, 3*time.Second)
		require.Equal(t, []bool{false, false, true}, []bool{calls[0].Of.claimed, calls[1].Of.claimed, calls[2].Of.claimed})
	})
}

func TestACallerWhoGivesUpAfterTheClaimHearsOfIt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSimulation(t, 10)
		calls := w.reserveTogether(2)
		behind := w.ask(t.Context(), time.Second, "a")
		time.Sleep(2500 * time.Millisecond)
		calls[0].cancel()
		calls[0].requireWaits(t)
		calls[0].requireAnswered(t, 3*time.Second)
		calls[1].requireAnswered(t, 3*time.Second)
		behind.requireAnswered(t, 3*time.Second) // it was in their batch
	})
}

// If all callers of a batch have given up, the batch is cancelled, for example if its connection hangs.
func TestABatchWhoseCallersHaveAllGivenUpIsCancelled(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSimulation(t, 10)
		calls := w.reserveTogether(2)
		calls = append(calls, w.ask(t.Context(), time.Second, "a"))
		time.Sleep(2500 * time.Millisecond)
		for _, p := range calls {
			p.requireWaits(t)
			p.cancel()
		}
		for _, p := range calls {
			p.requireFails(t, context.Canceled)
			require.Equal(t, 2500*time.Millisecond, p.took)
		}
		w.reserve(t.Context()).requireAnswered(t, 2*time.Second)
	})
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
					p.requireFails(t, context.DeadlineExceeded)
					require.Equal(t, c.took, p.took)
				}
				time.Sleep(time.Minute)
			})
		})
	}
}

// A claimed call that then finds its row locked waits like any other.
func TestACallThatWaitsAfterTheClaimCanBeLeft(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSimulation(t, 10)
		w.ask(t.Context(), time.Second, "a")
		var calls []*pending
		for range 3 {
			calls = append(calls, w.make(t.Context(), &job{writes: time.Second, held: "b"}, time.Second, nil, "a", "b"))
		}
		time.Sleep(2500 * time.Millisecond)
		release := w.hold("b")
		calls[0].cancel()
		calls[0].requireWaits(t) // it was claimed
		time.Sleep(time.Second)
		calls[0].requireFails(t, context.Canceled)
		require.Equal(t, 3*time.Second, calls[0].took)
		calls[1].cancel() // by now it waits for the row
		calls[1].requireFails(t, context.Canceled)
		require.Equal(t, 3500*time.Millisecond, calls[1].took)
		release()
		calls[2].requireAnswered(t, 5500*time.Millisecond)
	})
}

// A panic of a hook after the claim also reaches callers who have given up.
func TestAPanicReachesThoseWhoHaveGivenUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSimulation(t, 10)
		w.ask(t.Context(), time.Second, "a")
		crash := func() { panic("out of fuel") }
		early := w.make(t.Context(), &job{writes: time.Second}, time.Second, crash, "a")
		with := w.reserve(t.Context())
		time.Sleep(2500 * time.Millisecond)
		early.cancel()
		early.requireWaits(t)
		for _, p := range []*pending{early, with} {
			p.requirePanics(t, "out of fuel")
		}
		w.reserve(t.Context()).requireAnswered(t, 2*time.Second)
	})
}

// freed counts how often a call was given back.
type freed int

func (f *freed) Free() { *f++ }

// askOwned makes a call whose owner counts how often he gets it back.
func (w *simulation) askOwned(ctx context.Context, j *job, keys ...string) (*pending, *freed) {
	owner := new(freed)
	j.Owner = owner
	return w.make(ctx, j, time.Millisecond, nil, keys...), owner
}

// A call is given back once, after its caller and all of its batches are done with it.
func TestACallIsGivenBackOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSimulation(t, 10)
		release := w.hold("b")
		w.ask(t.Context(), time.Millisecond, "a")
		inTwo, ofTwo := w.askOwned(t.Context(), &job{}, "a", "b")
		other, ofOther := w.askOwned(t.Context(), &job{}, "a")
		other.requireAnswered(t, 2*time.Millisecond)
		inTwo.requireWaits(t)
		release()
		<-inTwo.ended
		require.NoError(t, inTwo.err)
		require.Zero(t, *ofTwo+*ofOther, "their callers have not said that they are done with them")
		inTwo.Done()
		other.Done()
		synctest.Wait()
		require.Equal(t, []freed{1, 1}, []freed{*ofTwo, *ofOther})
	})
}

// A call whose caller left, or whose batch panicked, is not given back: its batch may still read it.
func TestACallIsKeptThatABatchMayRead(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSimulation(t, 10)
		alone := w.ask(t.Context(), time.Millisecond, "a")
		left, ofLeft := w.askOwned(t.Context(), &job{}, "a")
		leaves, ofLeaves := w.askOwned(t.Context(), &job{}, "a")
		left.cancel()
		alone.requireAnswered(t, time.Millisecond)
		leaves.cancel()
		<-leaves.ended
		ofCrash := new(freed)
		crash := &job{}
		crash.Owner = ofCrash
		w.ask(t.Context(), time.Millisecond, "b")
		w.make(t.Context(), crash, time.Millisecond, func() { panic("a hook") }, "b").requirePanics(t, "a hook")
		time.Sleep(time.Minute)
		require.Zero(t, *ofLeft+*ofLeaves+*ofCrash)
	})
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
