package integration_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// cutCall is a call of a crowd. The answers of all calls for one bucket must fit the tokens taken from it.
type cutCall struct {
	wants   []want // all of them or none
	call    func(ctx context.Context, limiter *ratelimit.Limiter, requests []ratelimit.Request) (bool, error)
	commits bool // whether an error but ErrCommitUnknown says that nothing was taken
}

// want is the cost of a call for a bucket.
type want struct {
	limit ratelimit.Limit
	key   string
	cost  float64
}

func (w want) bucket() string { return w.limit.Name() + " " + w.key }

func cutTake(wants ...want) cutCall {
	return cutCall{wants: wants, call: func(ctx context.Context, limiter *ratelimit.Limiter, requests []ratelimit.Request) (bool, error) {
		d, err := limiter.Take(ctx, requests...)
		return d.Allowed, err
	}}
}

func cutReserve(wants ...want) cutCall {
	return cutCall{wants: wants, commits: true, call: func(ctx context.Context, limiter *ratelimit.Limiter, requests []ratelimit.Request) (bool, error) {
		r, err := limiter.Reserve(ctx, requests...)
		return r.Allowed, err
	}}
}

// cutTakeUpTo takes four times its cost, because the bucket has enough.
func cutTakeUpTo(of want) cutCall {
	return cutCall{wants: []want{{of.limit, of.key, 4 * of.cost}}, commits: true, call: func(ctx context.Context, l *ratelimit.Limiter, _ []ratelimit.Request) (bool, error) {
		_, d, err := l.TakeUpTo(ctx, 4, of.limit.For(of.key).Cost(of.cost))
		return d.Allowed, err
	}}
}

// requests returns a request for each bucket of the call.
func (c *cutCall) requests() []ratelimit.Request {
	all := make([]ratelimit.Request, len(c.wants))
	for i, w := range c.wants {
		all[i] = w.limit.For(w.key).Cost(w.cost)
	}
	return all
}

// takeFrom subtracts the costs of the call, times times.
func (c *cutCall) takeFrom(taken map[string]float64, times float64) {
	for _, w := range c.wants {
		taken[w.bucket()] -= times * w.cost
	}
}

// scarce has three tokens for two calls that want two.
var scarce = ratelimit.Define("scarce", hoard(3))

// sliced is a sliding window that gains nothing while a test runs.
var sliced = ratelimit.Define("sliced", ratelimit.SlidingWindow{Rate: callsCapacity, Period: ratelimit.Day, Slices: 24})

// cutCrowd returns calls of each kind, which are made at once. Some of them share a statement.
func cutCrowd(key string) []cutCall {
	return []cutCall{
		cutTake(want{calls, key + "0", 1}), cutTake(want{calls, key + "1", 1}),
		cutTake(want{calls, key + "2", 1}, want{roomy, key + "2", 3}), cutTake(want{sliced, key, 1}), cutTake(want{sliced, key + "0", 1}),
		cutTake(want{sliced, key + "1", 1}),
		cutTake(want{shardedCalls, key, 1}), cutTake(want{calls, key + "3", 1}), cutReserve(want{calls, key + "r", 2}, want{roomy, key + "r", 1}),
		cutTake(want{scarce, key, 2}), cutTake(want{scarce, key, 2}),
		cutTake(want{roomy, key + "4", 1}, want{calls, key + "4", 1}, want{other, key, 1}), cutTakeUpTo(want{roomy, key + "5", 1}),
	}
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
	key := fmt.Sprint(n, " ")
	made := cutCrowd(key)
	conn, err := s.pool.Acquire(t.Context()) // so that all calls are there before the first is sent
	require.NoError(t, err)
	askers := make([]*asker, len(made))
	for i, m := range made {
		askers[i] = startAsking(t, func(ctx context.Context) (bool, error) { return m.call(ctx, s.limiter, m.requests()) })
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
	s.requireTrue(t, made, askers)
	if !reached {
		for i, a := range askers {
			require.NoError(t, a.err, "call %d", i)
		}
		return false
	}
	_, _ = s.limiter.Take(t.Context(), calls.For(key+"after")) // finds out that the connection is broken
	takeOne(t, s.limiter, calls.For(key+"after"))
	return true
}

// requireTrue checks the answers against the rows. The tokens taken are the costs of some of the calls, each as a whole: of all
// allowed calls, and of no call whose answer says that it took nothing.
func (s *stand) requireTrue(t *testing.T, made []cutCall, askers []*asker) {
	t.Helper()
	taken := s.takenOf(t)
	left := maps.Clone(taken)
	var unknown []cutCall
	buckets := map[string]bool{}
	for i, m := range made {
		a := askers[i]
		require.False(t, a.err != nil && a.allowed, "an error carries no admission")
		for _, w := range m.wants {
			buckets[w.bucket()] = true
			require.True(t, a.err != nil || a.allowed || taken[w.bucket()]+w.cost > w.limit.Capacity(), "%s was refused while there was enough", w.bucket())
		}
		switch {
		case a.err == nil && a.allowed:
			m.takeFrom(left, 1)
		case a.err != nil && (!m.commits || errors.Is(a.err, ratelimit.ErrCommitUnknown)):
			unknown = append(unknown, m)
		}
	}
	maps.DeleteFunc(left, func(bucket string, _ float64) bool { return !buckets[bucket] })
	require.True(t, areTaken(unknown, left), "beyond what was allowed these were taken: %v; these may be: %v", left, unknown)
	require.Equal(t, s.outside.count(t, `SELECT count(*) FROM ratelimit.reservations`),
		s.outside.count(t, `SELECT count(*) FROM ratelimit.buckets WHERE name = 'roomy' AND key LIKE '%r' AND value < 1e6 - 0.5`), "reservations and what they took")
}

// areTaken reports whether the costs of some of the calls add up to exactly taken.
func areTaken(calls []cutCall, taken map[string]float64) bool {
	if len(calls) == 0 {
		return !slices.ContainsFunc(slices.Collect(maps.Values(taken)), func(n float64) bool { return n != 0 })
	}
	c := calls[0]
	if areTaken(calls[1:], taken) {
		return true
	}
	c.takeFrom(taken, 1)
	defer c.takeFrom(taken, -1)
	return areTaken(calls[1:], taken)
}

// takenOf returns how many tokens were taken from each bucket of the limits of crowds.
func (s *stand) takenOf(t *testing.T) map[string]float64 {
	t.Helper()
	taken := map[string]float64{}
	for _, r := range s.outside.rows(t, "") {
		for _, limit := range []ratelimit.Limit{calls, shardedCalls, roomy, other, scarce, sliced} {
			if r.Name == limit.Name() {
				rows := 1.0
				if limit == shardedCalls {
					rows = 8
				}
				taken[r.Name+" "+r.Key] += limit.Capacity()/rows - r.Value // of a row it may be a part of a token
			}
		}
	}
	for bucket, n := range taken {
		taken[bucket] = math.Round(n) // without the fraction that arrived meanwhile
	}
	return taken
}
