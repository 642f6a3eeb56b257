//go:build unix

package torture_test

import (
	"context"
	"encoding/json"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
	"github.com/pgratelimit/pgratelimit/ratelimit/take"
	"github.com/pgratelimit/pgratelimit/rules"
)

// actions are what workers do, each in weight of the sum of all weights cases.
var actions = []struct {
	weight int
	do     func(*worker)
}{
	{12, taking("still", "stillShards", "stillWindow", "stillSliding", "year")},
	{10, taking("tight", "tightShards", "tightSliding")},
	{16, taking("flow", "flowShards", "window", "sliding", "ruled")},
	{4, func(w *worker) { w.take(w.pair()...) }},
	{3, func(w *worker) { w.take(w.wishes("still", "tight", "year")...) }},
	{3, func(w *worker) { w.take(w.wishes("flow", "stillShards", "sliding", "stillWindow")...) }},
	{1, taking("reset")},
	{4, (*worker).takeUpTo},
	{2, (*worker).require},
	{4, (*worker).borrow},
	{4, (*worker).correct},
	{1, (*worker).reset},
	{2, (*worker).wait},
	{3, (*worker).look},
	{6, (*worker).reservation},
	{4, (*worker).ready},
	{4, (*worker).slot},
	{2, (*worker).hold},
	{12, func(w *worker) { w.tx([]string{"rc", "rr", "ser"}[w.random.IntN(3)]) }},
	{4, func(w *worker) { w.tx("intx") }},
}

// act draws an action and does it.
func (w *worker) act() {
	total := 0
	for _, a := range actions {
		total += a.weight
	}
	drawn := w.random.IntN(total)
	for _, a := range actions {
		if drawn -= a.weight; drawn < 0 {
			a.do(w)
			return
		}
	}
}

// taken returns what a decision says was taken by a call that began at an instant.
func taken(wishes []wish, d ratelimit.Decision) (items []item, err error) {
	for i, of := range wishes {
		state := &d.States[i]
		it := item{place: of.item().place, Tokens: state.Cost, Lo: d.At.UnixMicro()}
		if of.sharp {
			text, err := json.Marshal(state.Value)
			if err != nil {
				return nil, err
			}
			var row struct {
				TS int64 `json:"ts_us"`
			}
			if err := json.Unmarshal(text, &row); err != nil {
				return nil, err
			}
			it.Lo = max(it.Lo, row.TS)
			it.Hi = it.Lo
		}
		if state.Allowed { // a guarantee that refused while its pool gave has paid nothing
			items = append(items, it)
		}
	}
	return items, nil
}

func taking(names ...string) func(*worker) { return func(w *worker) { w.take(w.wish(names...)) } }

// take takes from one or several limits outside of a transaction.
func (w *worker) take(wishes ...wish) {
	w.decide("take", wishes, func(ctx context.Context, limiter *ratelimit.Limiter) (ratelimit.Decision, error) {
		return limiter.Take(ctx, requests(wishes)...)
	})
}

// require takes where the caller wants no decision, but nil or an error.
func (w *worker) require() {
	of := w.wish("still", "tight", "year", "tightSliding")
	w.change("require", "", []item{of.item()}, func(ctx context.Context, limiter *ratelimit.Limiter) error { return limiter.Require(ctx, of.request()) })
}

// takeUpTo takes the available tokens.
func (w *worker) takeUpTo() {
	of, n := w.wish("still", "flow", "window", "tight"), 1+w.random.IntN(5)
	of.most = of.cost * float64(n)
	w.decide("takeUpTo", []wish{of}, func(ctx context.Context, limiter *ratelimit.Limiter) (ratelimit.Decision, error) {
		_, d, err := take.UpTo(ctx, limiter, n, of.request())
		return d, err
	})
}

// borrow takes from a guarantee and from a pool, and from the pool alone when the guarantee is used up.
func (w *worker) borrow() {
	both := w.wishes("own", "pool")
	both[1].cost = both[0].cost
	w.decide("borrow", both, func(ctx context.Context, limiter *ratelimit.Limiter) (ratelimit.Decision, error) {
		d, err := take.Borrow(ctx, limiter, both[0].cost, both[0].request(), both[1].request())
		if len(d.States) == 1 { // the guarantee paid, and then the pool was charged
			d.States = append(d.States, d.States[0])
		}
		return d, err
	})
}

// correct takes, and then gives a part back or takes more, by each of the verbs for that.
func (w *worker) correct() {
	of := w.wish("corrected")
	of.cost += 2
	var at time.Time
	took := w.decide("take", []wish{of}, func(ctx context.Context, limiter *ratelimit.Limiter) (ratelimit.Decision, error) {
		d, err := limiter.Take(ctx, of.request())
		at = d.At
		return d, err
	})
	if took.Outcome != allowed {
		return
	}
	two := of
	two.cost = 2
	more, less := two.item(), two.item()
	less.Tokens = -2
	switch w.random.IntN(3) {
	case 0:
		w.change("credit", "", []item{less}, func(ctx context.Context, limiter *ratelimit.Limiter) error { return limiter.Credit(ctx, two.request()) })
	case 1:
		w.change("credit taken", "", []item{less}, func(ctx context.Context, limiter *ratelimit.Limiter) error {
			return limiter.CreditTaken(ctx, at, two.request())
		})
	default:
		w.change("charge", "", []item{more}, func(ctx context.Context, limiter *ratelimit.Limiter) error { return limiter.Charge(ctx, two.request()) })
	}
}

// reset fills a bucket, which gives back no more than it can hold.
func (w *worker) reset() {
	of := w.wish("reset")
	back := of.item()
	back.Tokens = -of.bound.capacity
	w.change("reset", "", []item{back}, func(ctx context.Context, limiter *ratelimit.Limiter) error { return limiter.Reset(ctx, of.request()) })
}

// delays stores when the reservation of a Wait was ready.
type delays struct{}

type delayKey struct{}

func (delays) Observe(ctx context.Context, e event.Event) {
	if of, ok := ctx.Value(delayKey{}).(*atomic.Int64); ok {
		if decided, ok := e.(ratelimit.Decided); ok && decided.Decision.Allowed {
			of.Store(decided.Delay.Microseconds())
		}
	}
}

// wait waits for its turn.
func (w *worker) wait() {
	of := w.wish("queue")
	var delay atomic.Int64
	w.decide("wait", []wish{of}, func(ctx context.Context, limiter *ratelimit.Limiter) (ratelimit.Decision, error) {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		return take.Wait(context.WithValue(ctx, delayKey{}, &delay), limiter, of.request())
	}, func(e *entry) { e.Items[0].Lo += delay.Load() })
}

// look makes a Check, and reads the Value.
func (w *worker) look() {
	of := w.wish("still", "flow", "flowShards", "window", "sliding", "year", "slots")
	w.change("look", "", nil, func(ctx context.Context, limiter *ratelimit.Limiter) error {
		if _, err := limiter.Check(ctx, of.request()); err != nil {
			return err
		}
		if _, err := limiter.Value(ctx, of.request()); err != nil {
			return err
		}
		_, err := limiter.CheckReserve(ctx, w.wish("ready").request())
		return err
	})
}

// reservation makes a reservation, and continues it in one of several ways. Sometimes it is never ended.
func (w *worker) reservation() {
	wishes := w.wishes([][]string{{"reserved"}, {"reserved", "released"}}[w.random.IntN(2)]...)
	var id string
	w.decide("reserve", wishes, func(ctx context.Context, limiter *ratelimit.Limiter) (ratelimit.Decision, error) {
		r, err := limiter.Reserve(ctx, requests(wishes)...)
		id = r.ID
		return r.Decision, err
	}, func(e *entry) { e.ID = id })
	if id == "" {
		return
	}
	end := func(verb string, items []item, do func(ctx context.Context, limiter *ratelimit.Limiter) error) bool {
		return w.change(verb, id, items, do) == allowed
	}
	start := func(ctx context.Context, limiter *ratelimit.Limiter) error {
		if _, err := limiter.Start(ctx, id); err != nil {
			return err
		}
		_, err := limiter.Started(ctx, id)
		return err
	}
	cancel := func(ctx context.Context, limiter *ratelimit.Limiter) error { return limiter.Cancel(ctx, id) }
	renew := func(ctx context.Context, limiter *ratelimit.Limiter) error {
		_, err := limiter.Renew(ctx, id)
		return err
	}
	settle := func() {
		actual := wishes[0]
		actual.cost = float64(w.random.IntN(6))
		end("settle", []item{actual.item()}, func(ctx context.Context, limiter *ratelimit.Limiter) error {
			return limiter.Settle(ctx, id, actual.request())
		})
	}
	switch w.random.IntN(8) {
	case 0: // it stays open
	case 1, 2:
		end("cancel", nil, cancel)
	case 3:
		if end("cancel", nil, cancel) && end("renew", nil, renew) && w.random.IntN(2) == 0 {
			settle()
		}
	default:
		if end("start", nil, start) {
			settle()
		}
	}
}

// ready makes a reservation of tokens that are not available yet, and never ends it: it is ready at some instant, and
// stays paid.
func (w *worker) ready() {
	of := w.wish("ready")
	var r ratelimit.Reservation
	w.decide("reserve", []wish{of}, func(ctx context.Context, _ *ratelimit.Limiter) (_ ratelimit.Decision, err error) {
		r, err = w.limiters[0].Reserve(ctx, of.request()) // not the one whose reservations are given back
		return r.Decision, err
	}, func(e *entry) { e.ID, e.Items[0].Lo = r.ID, r.ReadyAt.UnixMicro() })
}

// slot holds slots while it takes something else, and gives them back or lets the lease end.
func (w *worker) slot() {
	both := w.wishes("slots", "still")
	both[0].cost = float64(1 + w.random.IntN(2))
	var lease ratelimit.Lease
	acquired := w.decide("acquire", both, func(ctx context.Context, limiter *ratelimit.Limiter) (_ ratelimit.Decision, err error) {
		lease, err = limiter.Acquire(ctx, requests(both)...)
		return lease.Decision, err
	})
	if acquired.Outcome != allowed {
		return
	}
	from, until := now(), lease.Until.UnixMicro()
	for range w.random.IntN(3) {
		w.take(w.wish("still", "flow"))
	}
	renewed := lease
	renew := func(ctx context.Context, limiter *ratelimit.Limiter) (err error) {
		renewed, err = limiter.RenewLease(ctx, lease.ID)
		return err
	}
	if w.random.IntN(2) == 0 && w.change("renewLease", "", nil, renew) == allowed {
		until = max(until, renewed.Until.UnixMicro())
		w.take(w.wish("still", "flow"))
	}
	if w.random.IntN(8) > 0 {
		until = min(until, now()) // it may be given back from here on
		w.change("release", "", nil, func(ctx context.Context, limiter *ratelimit.Limiter) error { return limiter.Release(ctx, lease.ID) })
	}
	w.held(acquired.Call, both[0], from, until)
}

// hold holds a slot while a function runs, and has it renewed.
func (w *worker) hold() {
	of := w.wish("slots")
	of.cost = 1
	w.change("hold", "", nil, func(ctx context.Context, limiter *ratelimit.Limiter) error {
		return limiter.Hold(ctx, func(_ context.Context, lease ratelimit.Lease) error {
			from := now()
			for range w.random.IntN(4) {
				w.take(w.wish("still", "flow"))
			}
			// Whether it was renewed is not told, and that it was lost may be heard late.
			w.held("hold", of, from, min(now(), lease.Until.UnixMicro()))
			return nil
		}, of.request())
	})
}

// held writes that slots were held for certain from an instant to another.
func (w *worker) held(call string, of wish, from, until int64) {
	if from < until {
		it := of.item()
		it.Lo, it.Hi = from, until
		w.write(&entry{Begin: from, End: until, Call: call, Verb: "held", Outcome: allowed, Items: []item{it}})
	}
}

// mostRuled is the largest capacity, and the largest rate a second, that the rules of a run give.
const mostRuled = 20

// keepHouse does the housekeeping of a program: it prunes, ends expired reservations, and changes the rules.
func (w *worker) keepHouse(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Duration(200+w.random.IntN(800)) * time.Millisecond):
		}
		w.change("prune", "", nil, func(ctx context.Context, limiter *ratelimit.Limiter) error {
			_, err := limiter.Prune(ctx, w.catalog.limits...)
			return err
		})
		w.change("expire", "", nil, func(ctx context.Context, limiter *ratelimit.Limiter) error { _, err := limiter.Expire(ctx); return err })
		w.change("rule", "", nil, func(ctx context.Context, _ *ratelimit.Limiter) error {
			rule := rules.Rule{Limit: "ruled", Policy: perSecond(float64(5+w.random.IntN(mostRuled-4)), float64(5+w.random.IntN(mostRuled-4)))}
			_, err := w.store.Put(ctx, rules.Edit{Author: "torture", Reason: "to see what it does"}, rule)
			return err
		})
	}
}
