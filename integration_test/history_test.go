package integration_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// What many callers at once are told about one bucket must be what one after the other could have been
// told, in some order in which nobody is answered before he asked. The bucket of these tests gains a unit
// each microsecond and a power of two of them is a token, so that the answers are exact in float64 and this model can
// count in integers.
const (
	historyFull    = 64 // tokens
	historyMaxDebt = 32
)

// timing is the clock of a history, and how many units are a token on it. How fast the machine is decides nothing.
type timing struct {
	name          string
	unitsPerToken int64
	clock         *clock // nil: the database's
}

func timings() []timing {
	moved := &clock{}
	moved.set(clockNoon)
	return []timing{
		// Each operation brings half a token, so that some are refused and some allowed all the time.
		{"OnAClockThatTheCallersMove", 1 << 11, moved},
		// A token takes half an hour to arrive; what arrives while the test runs is in the last digits only.
		{"OnTheDatabasesClock", 1 << 31, nil},
	}
}

func (o timing) units(tokens float64) int64 { return int64(tokens * float64(o.unitsPerToken)) }

func (o timing) limit() ratelimit.Limit {
	return ratelimit.Define("history", ratelimit.TokenBucket{
		Rate: 1, Period: time.Duration(o.unitsPerToken) * time.Microsecond, Capacity: historyFull, MaxReserved: historyMaxDebt,
	})
}

// limiter returns one on the clock.
func (o timing) limiter(t *testing.T, b *bundle) *ratelimit.Limiter {
	t.Helper()
	if o.clock == nil {
		return b.with(t, ratelimit.Config{})
	}
	return b.with(t, ratelimit.Config{AsOf: o.clock.now})
}

// pass moves the clock on, if that is for the callers to do.
func (o timing) pass(random *rand.Rand) {
	if o.clock != nil {
		o.clock.unixMicro.Add(random.Int64N(o.unitsPerToken))
	}
}

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

func (o timing) model() porcupine.Model {
	full := o.units(historyFull)
	return porcupine.Model{
		Init: func() any { return content{} },
		Step: func(state, input, output any) (bool, any) {
			was, asked, told := state.(content), input.(question), output.(reply)
			holds := full
			if was.used {
				holds = min(full, was.units+max(0, told.at-was.ts))
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

func (o timing) reply(d ratelimit.Decision, state int) reply {
	s := d.States[state]
	return reply{allowed: s.Allowed, at: d.At.UnixMicro(), units: o.units(s.Value.Tokens)}
}

func TestHistoryOfABucketIsLinearizable(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "hundreds of calls; TestHistoryOfAllKindsIsLinearizable has some of each kind")
	onEach(t, testHistoryOfABucketIsLinearizable, onPostgres, inMemory, byRoutedStatements)
}

func testHistoryOfABucketIsLinearizable(t *testing.T, on backend) {
	for _, timing := range timings() {
		t.Run(timing.name, func(t *testing.T) {
			t.Parallel()
			const callers, each = 8, 50
			b := on.setup(t)
			h := bucketHistory{timing, timing.limiter(t, b), timing.limit().For("key")}
			var r recorder[question, reply]
			history := r.recordAll(t, callers, each, func(_ int, random *rand.Rand) operation[question, reply] { return h.draw(random) })
			requireBoth(t, history, func(told reply) bool { return told.allowed })
			requireLinearizable(t, timing.model(), history)

			h.bucket = timing.limit().For("another key")
			requireOnce(t, timing.model(), h.take(1))
		})
	}
}

// bucketHistory is what callers do with one bucket.
type bucketHistory struct {
	timing
	limiter *ratelimit.Limiter
	bucket  ratelimit.Request
}

func (h bucketHistory) take(cost float64) operation[question, reply] {
	return operation[question, reply]{question{cost: h.units(cost), keeps: true}, func(ctx context.Context) (reply, error) {
		return h.takeOn(ctx, h.limiter, cost)
	}}
}

func (h bucketHistory) takeOn(ctx context.Context, limiter *ratelimit.Limiter, cost float64) (reply, error) {
	d, err := limiter.Take(ctx, h.bucket.Cost(cost))
	if err != nil {
		return reply{}, err
	}
	return h.reply(d, 0), nil
}

// draw returns an operation on the bucket.
func (h bucketHistory) draw(random *rand.Rand) operation[question, reply] {
	h.pass(random)
	cost := float64(1+random.IntN(4*4)) / 4
	o := h.take(cost)
	undone := errors.New("undone")
	inTx := func(ctx context.Context, then error) (told reply, err error) {
		err = h.limiter.InTx(ctx, func(tx pgx.Tx) (err error) {
			told, err = h.takeOn(ctx, h.limiter.WithTx(tx), cost)
			return errors.Join(err, then)
		})
		return told, err
	}
	switch kind := random.IntN(10); kind {
	case 0:
		o.asks.keeps = false
		o.call = func(ctx context.Context) (reply, error) {
			d, err := h.limiter.Check(ctx, h.bucket.Cost(cost))
			if err != nil {
				return reply{}, err
			}
			return h.reply(d, 0), nil
		}
	case 1, 2:
		o.asks.lowest = -h.units(historyMaxDebt)
		o.call = func(ctx context.Context) (reply, error) {
			r, err := h.limiter.Reserve(ctx, h.bucket.Cost(cost))
			if err != nil {
				return reply{}, err
			}
			return h.reply(r.Decision, 0), nil
		}
	case 3, 4:
		o.call = func(ctx context.Context) (reply, error) { return inTx(ctx, nil) }
	case 5:
		o.asks.keeps = false
		o.call = func(ctx context.Context) (reply, error) {
			told, err := inTx(ctx, undone)
			if !errors.Is(err, undone) || ratelimit.IsRetryable(err) {
				return told, fmt.Errorf("the transaction was to be undone: %w", err)
			}
			return told, nil
		}
	}
	return o
}
