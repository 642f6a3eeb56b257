package integration_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// sliced is a sliding window that gains nothing while a test runs.
var sliced = ratelimit.Define("sliced", ratelimit.SlidingWindow{Rate: callsCapacity, Period: ratelimit.Day, Slices: 24})

// cutCall is a call for a bucket of each of its limits, all with the same key.
type cutCall struct {
	limits []ratelimit.Limit
	verb   func(requests ...ratelimit.Request) verb
	cost   float64 // which it takes of each
	// commits says that after an error other than ErrCommitUnknown nothing was taken.
	commits bool
}

// cutCrowd are calls of each kind, which are made at once. Some of them share a statement. There is nothing left of tight.
var cutCrowd = []cutCall{
	{[]ratelimit.Limit{calls}, taking, 1, false},
	{[]ratelimit.Limit{calls}, taking, 1, false},
	{[]ratelimit.Limit{calls, roomy}, taking, 1, false},
	{[]ratelimit.Limit{sliced}, taking, 1, false},
	{[]ratelimit.Limit{sliced}, taking, 1, false},
	{[]ratelimit.Limit{shardedCalls}, taking, 1, false},
	{[]ratelimit.Limit{calls, roomy}, reserving, 1, true},
	{[]ratelimit.Limit{calls, tight}, taking, 0, false},
	{[]ratelimit.Limit{roomy, calls, other}, taking, 1, false},
	{[]ratelimit.Limit{roomy}, func(requests ...ratelimit.Request) verb { return takingUpTo(4, requests...) }, 4, true},
}

// requests returns the requests of the call.
func (c cutCall) requests(key string) (all []ratelimit.Request) {
	for _, limit := range c.limits {
		all = append(all, limit.For(key))
	}
	return all
}

// Wherever the connection of a batch breaks, each of its callers gets an error or an answer. An answer is true. A call with an
// error has taken all of its cost or nothing. The next batch works.
func TestABatchWhoseConnectionBreaksAnywhere(t *testing.T) {
	t.Parallel()
	for name, side := range map[string]cut{
		"BeforeTheRequest": cutRequest, "InTheRequest": cutHalfRequest, "AtTheAnswer": cutAnswer, "InTheAnswer": cutHalfAnswer,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cutter := &cutter{}
			s := newStand(t, cutter.on, oneConnection)
			require.NoError(t, s.outside.limiter.Credit(t.Context(), calls.For("first"))) // stores the fingerprint
			n := 1
			for s.cutAt(t, cutter, n, side) {
				n++
			}
			require.Greater(t, n, 4, "a call alone, and the parts of a batch")
			s.requireHealthy(t)
		})
	}
}

// cutAt breaks the connection of a crowd at the n-th request that it sends, and reports whether it sent so many.
func (s *stand) cutAt(t *testing.T, cutter *cutter, n int, side cut) (reached bool) {
	t.Helper()
	key := func(i int) string { return fmt.Sprint(n, " ", i) }
	conn, err := s.pool.Acquire(t.Context()) // so that all calls are there before the first is sent
	require.NoError(t, err)
	askers := make([]*asker, len(cutCrowd))
	for i, c := range cutCrowd {
		if slices.Contains(c.limits, tight) {
			takeAll(t, s.outside.limiter, tight.For(key(i)))
		}
		askers[i] = startAsking(t, func(ctx context.Context) (bool, error) { return c.verb(c.requests(key(i))...)(ctx, s.limiter) })
		if i == 0 {
			askers[0].awaitUnderway() // it goes alone; the others come together, before a busy machine takes its batch for slow
		}
	}
	for _, a := range askers {
		a.awaitUnderway()
	}
	cutter.armAt(n, side, nil)
	conn.Release()
	for _, a := range askers {
		eventually(t, "each call has its answer", a.hasEnded)
	}
	reached = cutter.seen() >= n
	cutter.arm("", 0, 0)
	reservations := 0
	for i, c := range cutCrowd {
		a := askers[i]
		require.True(t, reached || a.err == nil, "call %d: %v", i, a.err)
		taken := s.takenBy(t, c, key(i))
		if a.err == nil || c.commits && !errors.Is(a.err, ratelimit.ErrCommitUnknown) {
			require.Equal(t, a.allowed && a.err == nil, taken > 0, "call %d: allowed %t, %v, and %v is taken", i, a.allowed, a.err, taken)
		}
		require.Contains(t, []float64{0, c.cost}, taken, "call %d", i)
		if len(c.limits) > 1 && c.commits && taken > 0 {
			reservations++
		}
	}
	require.Equal(t, reservations, s.outside.count(t, `SELECT count(*) FROM ratelimit.reservations WHERE keys[1] LIKE $1`, fmt.Sprint(n, " %")))
	_, _ = s.limiter.Take(t.Context(), calls.For("after")) // finds out that the connection is broken
	takeOne(t, s.limiter, calls.For("after"))
	return reached
}

// takenBy returns how many tokens a call has taken, which must be as many of each of its buckets.
func (s *stand) takenBy(t *testing.T, c cutCall, key string) (taken float64) {
	t.Helper()
	for i, request := range c.requests(key) {
		if request.Limit() == tight {
			continue
		}
		of := math.Round(request.Limit().Capacity() - tokens(t, s.outside.limiter, request))
		require.True(t, i == 0 || of == taken, "%v of %s, %v of another limit", of, request.Limit().Name(), taken)
		taken = of
	}
	return taken
}
