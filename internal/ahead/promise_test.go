package ahead

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// admission is tokens that were admitted.
type admission struct {
	at     time.Time // when they were
	told   time.Time // when they were, as the decision says
	policy int
	cost   float64

	ts         int64 // of the row that they came from
	ownInstant bool  // whether at is when this process answered from memory
}

// requirePromise checks every span of the history, both by the real time of each admission and by the time in its decision. The
// tokens admitted in a span are at most the capacity at its beginning plus the arriving tokens.
func (w *prefetchWorld) requirePromise(t *testing.T) {
	t.Helper()
	for name, at := range map[string]func(a admission) time.Time{
		"at": func(a admission) time.Time { return a.at }, "told": func(a admission) time.Time { return a.told },
	} {
		slices.SortStableFunc(w.took, func(a, b admission) int { return at(a).Compare(at(b)) })
		most, admitted := math.Inf(1), 0.0
		for _, a := range w.took {
			instant := at(a)
			capacity, arrived := w.arrivedBy(instant)
			most = min(most, admitted-arrived+capacity) // of admitted - arrived, for spans that begin here and before
			admitted += a.cost
			require.LessOrEqual(t, admitted-arrived, most, "by %q, at %v", name, instant)
		}
	}
	require.Greater(t, w.fromMemory, len(w.took)/20)
	require.Positive(t, w.died)
}

// arrivedBy returns the tokens that have arrived by an instant under the policies so far, and the capacity of the policy in effect.
func (w *prefetchWorld) arrivedBy(instant time.Time) (capacity, arrived float64) {
	for i, limit := range w.policies {
		until := instant
		if i+1 < len(w.changed) && w.changed[i+1].Before(until) {
			until = w.changed[i+1]
		}
		if i > 0 && !instant.After(w.changed[i]) {
			break
		}
		arrived += limit.rate * float64(until.Sub(w.changed[0]).Microseconds()-w.changed[i].Sub(w.changed[0]).Microseconds()) / 1024
		capacity = limit.capacity
	}
	return capacity, arrived
}
