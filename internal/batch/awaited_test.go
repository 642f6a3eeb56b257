package batch

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
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
