//go:build unix

package torture_test

import (
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// note puts into the entry what a decision says was taken.
func note(e *entry, wishes []wish, d ratelimit.Decision) error {
	if !d.Allowed {
		e.outcome = refused
		return nil
	}
	e.items = nil
	for i, of := range wishes {
		state := &d.States[i]
		taken := item{name: of.Name(), key: of.key, tokens: state.Cost * state.Charged, lo: d.At.UnixMicro()}
		if state.Prefetched {
			taken.lo = min(taken.lo, e.begin)
		}
		if of.sharp {
			ts, err := tsOf(state.Value)
			if err != nil {
				return err
			}
			taken.lo = max(taken.lo, ts)
			taken.hi = taken.lo
		}
		e.items = append(e.items, taken)
	}
	return nil
}

// tsOf returns the ts of a row, in microseconds since 1970.
func tsOf(v ratelimit.Value) (int64, error) {
	text, err := json.Marshal(v)
	if err != nil {
		return 0, err
	}
	var row struct {
		TS int64 `json:"ts_us"`
	}
	err = json.Unmarshal(text, &row)
	return row.TS, err
}

// take takes from one or several limits outside of a transaction.
func (w *worker) take(wishes ...wish) {
	limiter, path := w.limiter()
	items, requests := itemsOf(wishes)
	w.call("take", path, items, func(ctx context.Context, e *entry) error {
		d, err := limiter.Take(ctx, requests...)
		if err != nil {
			return err
		}
		return note(e, wishes, d)
	})
}

// require takes where the caller wants no decision, but nil or an error.
func (w *worker) require(of wish) {
	limiter, path := w.limiter()
	w.call("require", path, []item{of.item()}, func(ctx context.Context, _ *entry) error { return limiter.Require(ctx, of.request()) })
}

// takeUpTo takes what there is.
func (w *worker) takeUpTo(of wish) {
	limiter, path := w.limiter()
	n := 1 + w.random.IntN(5)
	most := of.item()
	most.tokens *= float64(n)
	w.call("takeUpTo", path, []item{most}, func(ctx context.Context, e *entry) error {
		_, d, err := limiter.TakeUpTo(ctx, n, of.request())
		if err != nil {
			return err
		}
		return note(e, []wish{of}, d)
	})
}

// borrow takes from a guarantee and from a pool, and from the pool alone when the guarantee is used up.
func (w *worker) borrow() {
	limiter, path := w.limiter()
	own, pool := w.request("own"), w.request("pool")
	pool.cost = own.cost
	w.call("borrow", path, []item{own.item(), pool.item()}, func(ctx context.Context, e *entry) error {
		d, err := limiter.Take(ctx, ratelimit.Borrow(own.request(), pool.request()))
		if err != nil {
			return err
		}
		if err := note(e, []wish{own, pool}, d); err != nil || !d.Allowed {
			return err
		}
		if d.States[0].Borrowed {
			e.items = e.items[1:]
		}
		return nil
	})
}

// price takes from a limit whose price follows what its upstream throttles.
func (w *worker) price() {
	limiter, path := w.limiter()
	of := w.request("price")
	const highest = 10 // the Floor is a tenth
	most := of.item()
	most.tokens *= highest
	w.call("take", path, []item{most}, func(ctx context.Context, e *entry) error {
		outcome := ratelimit.Outcome{Throttled: w.random.IntN(10) == 0}
		if err := limiter.Report(ctx, of.request(), outcome); err != nil {
			return errors.Join(errNothing, err)
		}
		d, err := limiter.Take(ctx, of.request())
		if err != nil {
			return err
		}
		return note(e, []wish{of}, d)
	})
}

// correct takes, and then gives a part back or takes more, by each of the verbs for that.
func (w *worker) correct() {
	of := w.request("corrected")
	of.cost += 2
	var at time.Time
	limiter, path := w.limiter()
	taken := w.call("take", path, []item{of.item()}, func(ctx context.Context, e *entry) error {
		d, err := limiter.Take(ctx, of.request())
		if err != nil {
			return err
		}
		at = d.At
		return note(e, []wish{of}, d)
	})
	if taken.outcome != allowed {
		return
	}
	change := item{name: of.Name(), key: of.key, tokens: -2}
	two := of.For(of.key).Cost(2)
	switch w.random.IntN(3) {
	case 0:
		w.call("credit", path, []item{change}, func(ctx context.Context, _ *entry) error { return limiter.Credit(ctx, two) })
	case 1:
		w.call("credit taken", path, []item{change}, func(ctx context.Context, _ *entry) error { return limiter.CreditTaken(ctx, at, two) })
	default:
		change.tokens = 2
		w.call("charge", path, []item{change}, func(ctx context.Context, _ *entry) error { return limiter.Charge(ctx, two) })
	}
}

// reset fills a bucket, which gives back no more than it can hold.
func (w *worker) reset() {
	of := w.request("reset")
	limiter, path := w.limiter()
	w.call("reset", path, []item{{name: of.Name(), key: of.key, tokens: -of.bound.capacity}}, func(ctx context.Context, _ *entry) error {
		return limiter.Reset(ctx, of.request())
	})
}

// wait waits for its turn.
func (w *worker) wait() {
	of := w.request("queue")
	limiter, path := w.limiter()
	e := w.call("wait", path, []item{of.item()}, func(ctx context.Context, e *entry) error {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		var delay atomic.Int64
		d, err := limiter.Wait(context.WithValue(ctx, delayKey{}, &delay), of.request())
		if err != nil {
			return err
		}
		err = note(e, []wish{of}, d)
		if d.Allowed {
			e.items[0].lo += delay.Load()
		}
		return err
	})
	if e.outcome == unknown || e.outcome == failed {
		// Its reservation is cancelled, so others can take the tokens, while the callers behind it keep their time.
		w.write(&entry{
			begin: e.begin, end: e.end, call: e.call, verb: "cancelledWait", path: path, outcome: allowed,
			items: []item{{name: of.Name(), key: of.key, tokens: -of.cost, lo: e.begin, hi: forever}},
		})
	}
}

// look makes a Check, and reads the Value.
func (w *worker) look(random *rand.Rand) {
	limiter, path := w.limiter()
	of := w.request([]string{"still", "flow", "flowShards", "window", "sliding", "year", "slots"}[random.IntN(7)])
	w.call("look", path, nil, func(ctx context.Context, e *entry) error {
		d, err := limiter.Check(ctx, of.request())
		if err != nil {
			return err
		}
		if !d.Allowed {
			e.outcome = refused
		}
		if _, err := limiter.Value(ctx, of.request()); err != nil {
			return err
		}
		_, err = limiter.CheckReserve(ctx, w.request("ready").request())
		return err
	})
}
