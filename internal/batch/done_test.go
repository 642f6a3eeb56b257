package batch

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

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
