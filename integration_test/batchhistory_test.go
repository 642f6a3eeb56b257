package integration_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// What callers whose calls are folded, in two processes, are told about two buckets must be what one after the
// other could have been told, as in TestHistoryOfABucketIsLinearizable, whose bucket each of these is.

// pairQuestion is what one operation asks of the two buckets: nil where it asks nothing.
type pairQuestion [2]*question

// pairReply is what it was told of those it asked.
type pairReply struct {
	allowed bool
	of      [2]reply
}

func pairModel() porcupine.Model {
	one := historyModel()
	return porcupine.Model{
		Init: func() any { return [2]content{} },
		Step: func(state, input, output any) (bool, any) {
			was, asked, told := state.([2]content), input.(pairQuestion), output.(pairReply)
			after, enough := was, true
			for i := range asked {
				if asked[i] != nil {
					enough = enough && told.of[i].allowed
				}
			}
			if enough != told.allowed {
				return false, was
			}
			for i := range asked {
				if asked[i] == nil {
					continue
				}
				// One that had enough beside another that had not keeps what it was asked for.
				q, r := *asked[i], told.of[i]
				q.keeps = q.keeps && told.allowed
				possible, next := one.Step(was[i], q, r)
				if !possible {
					return false, was
				}
				after[i] = next.(content)
			}
			return true, after
		},
		Equal: func(a, b any) bool { return a == b },
	}
}

func TestHistoryOfBatchesIsLinearizable(t *testing.T) {
	t.Parallel()
	const callers, each = 12, 40
	b := setup(t)
	processes := []*ratelimit.Limiter{b.limiter, b.with(t, ratelimit.Config{})}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	started := time.Now()
	histories := make([][]porcupine.Operation, callers)
	require.NoError(t, together(callers, func(caller int) error {
		random := rand.New(rand.NewPCG(seed, uint64(caller)))
		for range each {
			asked, ask := randomPairOperation(processes[caller%4/3], random)
			call := time.Since(started)
			told, err := ask(t.Context())
			if err != nil {
				return err
			}
			histories[caller] = append(histories[caller], porcupine.Operation{
				ClientId: caller, Input: asked, Call: int64(call), Output: told, Return: int64(time.Since(started)),
			})
		}
		return nil
	}))
	history := slices.Concat(histories...)
	allowed := 0
	for _, operation := range history {
		if operation.Output.(pairReply).allowed {
			allowed++
		}
	}
	t.Logf("%d of %d allowed", allowed, len(history))
	require.Greater(t, allowed, 20)
	require.Less(t, allowed, len(history)-20)
	require.Equal(t, porcupine.Ok, porcupine.CheckOperationsTimeout(pairModel(), history, time.Minute))

	for i := len(history) - 1; ; i-- { // somebody is told of a token that was not there
		asked, told := history[i].Input.(pairQuestion), history[i].Output.(pairReply)
		if told.allowed && asked[0] != nil && asked[0].keeps {
			told.of[0].units += unitsPerToken
			history[i].Output = told
			break
		}
	}
	require.Equal(t, porcupine.Illegal, porcupine.CheckOperationsTimeout(pairModel(), history, time.Minute))
}

// randomPairOperation returns an operation on one or both of the buckets, and what it asks.
func randomPairOperation(limiter *ratelimit.Limiter, random *rand.Rand) (pairQuestion, func(context.Context) (pairReply, error)) {
	var asked pairQuestion
	var requests []ratelimit.Request
	var buckets []int
	check, reserve := random.IntN(8) == 0, random.IntN(6) == 0
	for i := range asked {
		if random.IntN(3) == 0 || i == 1 && len(requests) == 0 {
			cost := float64(1+random.IntN(4*4)) / 4
			asked[i] = &question{cost: int64(cost * unitsPerToken), keeps: !check}
			if reserve && !check {
				asked[i].lowest = -historyMaxDebt
			}
			requests = append(requests, historyLimit.For(fmt.Sprint("key", i)).Cost(cost))
			buckets = append(buckets, i)
		}
	}
	told := func(d ratelimit.Decision) pairReply {
		r := pairReply{allowed: d.Allowed}
		for n, i := range buckets {
			s := d.States[n]
			r.of[i] = reply{allowed: s.Allowed, at: d.At.UnixMicro(), units: int64(s.Value.Tokens * unitsPerToken)}
		}
		return r
	}
	return asked, func(ctx context.Context) (pairReply, error) {
		switch {
		case check:
			d, err := limiter.Check(ctx, requests...)
			if err != nil {
				return pairReply{}, err
			}
			return told(d), nil
		case reserve:
			r, err := limiter.Reserve(ctx, requests...)
			if err != nil {
				return pairReply{}, err
			}
			return told(r.Decision), nil
		}
		d, err := limiter.Take(ctx, requests...)
		if err != nil {
			return pairReply{}, err
		}
		return told(d), nil
	}
}
