package integration_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// What many callers at once are told about one bucket must be what one after the other could have been
// told, in some order in which nobody is answered before he asked. The bucket of these tests gains a unit
// each microsecond and 2048 units are a token, so that the answers are exact in float64 and this model can
// count in integers.
const (
	unitsPerToken  = 2048
	historyFull    = 16 * unitsPerToken
	historyMaxDebt = 8 * unitsPerToken
)

var historyLimit = ratelimit.Define("history", ratelimit.TokenBucket{
	Rate: 1, Period: unitsPerToken * time.Microsecond, Capacity: historyFull / unitsPerToken, MaxReserved: historyMaxDebt / unitsPerToken,
})

// question is what one operation asks.
type question struct {
	cost   int64 // in units
	lowest int64 // what may remain
	keeps  bool  // whether what is taken stays taken: not in a Check, nor when the transaction is rolled back
}

// reply is what it was told.
type reply struct {
	allowed   bool
	at, units int64 // the instant of the decision, and what the bucket held after it
}

// content is the state of the bucket in the model.
type content struct {
	used      bool // it has a row
	units, ts int64
}

func historyModel() porcupine.Model {
	return porcupine.Model{
		Init: func() any { return content{} },
		Step: func(state, input, output any) (bool, any) {
			was, asked, told := state.(content), input.(question), output.(reply)
			holds := int64(historyFull)
			if was.used {
				holds = min(historyFull, was.units+max(0, told.at-was.ts))
			}
			after := content{used: true, units: holds - asked.cost, ts: max(was.ts, told.at)}
			if after.units < asked.lowest {
				return !told.allowed && told.units == holds, was
			}
			if !asked.keeps {
				return told.allowed && (told.units == holds || told.units == after.units), was
			}
			return told.allowed && told.units == after.units, after
		},
	}
}

func replyOf(d ratelimit.Decision) reply {
	return reply{allowed: d.Allowed, at: d.At.UnixMicro(), units: int64(d.States[0].Value.Tokens * unitsPerToken)}
}

func TestHistoryOfABucketIsLinearizable(t *testing.T) {
	t.Parallel()
	const workers, operations = 8, 50
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	b := setup(t)
	started := time.Now()
	histories := make([][]porcupine.Operation, workers)
	require.NoError(t, together(workers, func(worker int) error {
		random := rand.New(rand.NewPCG(seed, uint64(worker)))
		for range operations {
			asked, ask := randomOperation(b, random)
			call := time.Since(started)
			told, err := ask(t.Context())
			if err != nil {
				return err
			}
			histories[worker] = append(histories[worker], porcupine.Operation{
				ClientId: worker, Input: asked, Call: int64(call), Output: told, Return: int64(time.Since(started)),
			})
		}
		return nil
	}))
	history := slices.Concat(histories...)
	allowed := 0
	for _, operation := range history {
		if operation.Output.(reply).allowed {
			allowed++
		}
	}
	t.Logf("%d of %d allowed", allowed, len(history))
	require.Greater(t, allowed, 20)
	require.Less(t, allowed, len(history)-20)
	result := porcupine.CheckOperationsTimeout(historyModel(), history, time.Minute)
	if result != porcupine.Ok {
		for _, operation := range history {
			t.Logf("%+v", operation)
		}
	}
	require.Equal(t, porcupine.Ok, result)

	lastTaken := len(history) - 1 // somebody is told of a token that was not there
	for !history[lastTaken].Input.(question).keeps {
		lastTaken--
	}
	told := history[lastTaken].Output.(reply)
	told.units += unitsPerToken
	history[lastTaken].Output = told
	require.Equal(t, porcupine.Illegal, porcupine.CheckOperationsTimeout(historyModel(), history, time.Minute))
}

// randomOperation returns an operation on the bucket, and what it asks.
func randomOperation(b *bundle, random *rand.Rand) (question, func(context.Context) (reply, error)) {
	cost := float64(1+random.IntN(4*4)) / 4
	request := historyLimit.For("key").Cost(cost)
	asked := question{cost: int64(cost * unitsPerToken), keeps: true}
	undone := errors.New("undone")
	inTx := func(ctx context.Context, call func(*ratelimit.Limiter) error) error {
		return b.limiter.InTx(ctx, func(tx pgx.Tx) error { return call(b.limiter.WithTx(tx)) })
	}
	take := func(ctx context.Context, told *reply) func(*ratelimit.Limiter) error {
		return func(limiter *ratelimit.Limiter) error {
			d, err := limiter.Take(ctx, request)
			if err == nil {
				*told = replyOf(d)
			}
			return err
		}
	}
	switch kind := random.IntN(10); kind {
	case 0:
		asked.keeps = false
		return asked, func(ctx context.Context) (told reply, err error) {
			d, err := b.limiter.Check(ctx, request)
			if err != nil {
				return told, err
			}
			return replyOf(d), nil
		}
	case 1, 2:
		asked.lowest = -historyMaxDebt
		return asked, func(ctx context.Context) (told reply, err error) {
			r, err := b.limiter.Reserve(ctx, request)
			if err != nil {
				return told, err
			}
			return replyOf(r.Decision), nil
		}
	case 3, 4:
		return asked, func(ctx context.Context) (told reply, err error) {
			err = inTx(ctx, take(ctx, &told))
			return told, err
		}
	case 5:
		asked.keeps = false
		return asked, func(ctx context.Context) (told reply, err error) {
			err = inTx(ctx, func(limiter *ratelimit.Limiter) error {
				return errors.Join(take(ctx, &told)(limiter), undone)
			})
			if !errors.Is(err, undone) || ratelimit.IsRetryable(err) {
				return told, fmt.Errorf("the transaction was to be undone: %w", err)
			}
			return told, nil
		}
	default:
		return asked, func(ctx context.Context) (told reply, err error) {
			err = take(ctx, &told)(b.limiter)
			return told, err
		}
	}
}
