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

func TestACallIsGivenBackOnceNeitherItsCallerNorItsBatchLooksAtIt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSimulation(t, 10)
		w.ask(t.Context(), time.Millisecond, "a")
		first, ofFirst := w.askOwned(t.Context(), &job{}, "a")
		second, ofSecond := w.askOwned(t.Context(), &job{}, "a")
		first.requireAnswered(t, 2*time.Millisecond)
		second.requireAnswered(t, 2*time.Millisecond)
		synctest.Wait()
		w.requireEmpty()
		require.Zero(t, *ofFirst, "its caller has not said that he is done with it")
		first.Done()
		require.EqualValues(t, 1, *ofFirst)
		second.Done()
		require.EqualValues(t, 1, *ofSecond)
	})
}

func TestACallThatWasInTwoBatchesIsGivenBackOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSimulation(t, 10)
		release := w.hold("b")
		w.ask(t.Context(), time.Millisecond, "a")
		waits, owner := w.askOwned(t.Context(), &job{}, "a", "b")
		other, _ := w.askOwned(t.Context(), &job{}, "a")
		other.requireAnswered(t, 2*time.Millisecond)
		waits.requireWaits(t)
		release()
		<-waits.ended
		require.NoError(t, waits.err)
		require.Zero(t, *owner)
		waits.Done()
		synctest.Wait()
		require.EqualValues(t, 1, *owner)
	})
}

func TestACallIsKeptThatABatchMayLookAt(t *testing.T) {
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
		crash := &job{}
		ofCrash := new(freed)
		crash.Owner = ofCrash
		w.ask(t.Context(), time.Millisecond, "b")
		panics := w.make(t.Context(), crash, time.Millisecond, func() { panic("a hook") }, "b")
		<-panics.ended
		require.Contains(t, panics.panics, "a hook")
		time.Sleep(time.Minute)
		w.requireEmpty()
		for _, of := range []*freed{ofLeft, ofLeaves, ofCrash} {
			require.Zero(t, *of)
		}
	})
}
