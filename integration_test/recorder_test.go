package integration_test

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// operation is a call and its question.
type operation[Q, A any] struct {
	asks Q
	call func(context.Context) (A, error)
}

// recorder records the questions and answers of callers. It numbers calls and returns as they happen, because clock readings could
// be equal.
type recorder[Q, A any] struct{ events atomic.Int64 }

func (r *recorder[Q, A]) record(ctx context.Context, caller int, o operation[Q, A]) (porcupine.Operation, error) {
	call := r.events.Add(1)
	told, err := o.call(ctx)
	return porcupine.Operation{ClientId: caller, Input: o.asks, Call: call, Output: told, Return: r.events.Add(1)}, err
}

// recordAll makes concurrent callers do a number of operations each.
func (r *recorder[Q, A]) recordAll(t *testing.T, callers, each int, draw func(caller int, random *rand.Rand) operation[Q, A]) []porcupine.Operation {
	t.Helper()
	seed := testsize.Seed(t)
	histories := make([][]porcupine.Operation, callers)
	require.NoError(t, atonce.Do(callers, func(caller int) error {
		random := rand.New(rand.NewPCG(seed, uint64(caller)))
		for range each {
			recorded, err := r.record(t.Context(), caller, draw(caller, random))
			if err != nil {
				return err
			}
			histories[caller] = append(histories[caller], recorded)
		}
		return nil
	}))
	return slices.Concat(histories...)
}

// requireBoth checks that the history has a refusal and an admission. How many depends on the seed and on the machine.
func requireBoth[A any](t *testing.T, history []porcupine.Operation, allowed func(A) bool) {
	t.Helper()
	n := 0
	for _, o := range history {
		if allowed(o.Output.(A)) {
			n++
		}
	}
	t.Logf("%d of %d allowed", n, len(history))
	require.Positive(t, n)
	require.Less(t, n, len(history))
}

// requireLinearizable checks that the model gives the same answers to the calls in some order in which no call is answered before
// it began.
func requireLinearizable(t *testing.T, model porcupine.Model, history []porcupine.Operation) {
	t.Helper()
	result := judge(model, history)
	if result != porcupine.Ok {
		for _, o := range history {
			t.Logf("%+v", o)
		}
	}
	require.Equal(t, porcupine.Ok, result)
}

// requireOnce checks that the model accepts the answer of take once, and not the same tokens a second time.
func requireOnce[Q, A any](t *testing.T, model porcupine.Model, take operation[Q, A]) {
	t.Helper()
	var r recorder[Q, A]
	told, err := r.record(t.Context(), 0, take)
	require.NoError(t, err)
	requireLinearizable(t, model, []porcupine.Operation{told})
	again, err := r.record(t.Context(), 0, operation[Q, A]{take.asks, func(context.Context) (A, error) { return told.Output.(A), nil }})
	require.NoError(t, err)
	require.Equal(t, porcupine.Illegal, judge(model, []porcupine.Operation{told, again}))
}

// judge finds an order within milliseconds. If there were none, it would need very long for many concurrent calls, because it must
// try all orders.
func judge(model porcupine.Model, history []porcupine.Operation) porcupine.CheckResult {
	return porcupine.CheckOperationsTimeout(model, history, 5*time.Minute)
}
