//go:build unix

package torture_test

import (
	"context"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// action is something that workers do, in weight of the sum of all weights cases.
type action struct {
	weight int
	do     func(*worker)
}

func one(names ...string) func(*worker) {
	return func(w *worker) { w.take(w.request(names[w.random.IntN(len(names))])) }
}

func several(w *worker) {
	switch w.random.IntN(3) {
	case 0:
		w.take(w.pair()...)
	case 1:
		w.take(w.request("still"), w.request("tight"), w.request("year"))
	default:
		w.take(w.request("flow"), w.request("stillShards"), w.request("sliding"), w.request("stillWindow"))
	}
}

func inTxAt(path string) func(*worker) { return func(w *worker) { w.tx(path) } }

// actions are what workers do while faults happen.
var actions = []action{
	{12, one("still", "stillShards", "stillWindow", "stillSliding", "year")},
	{10, one("tight", "tightShards", "tightSliding")},
	{16, one("flow", "flowShards", "window", "sliding", "ruled")},
	{10, one("ahead", "windowAhead", "tightAhead")},
	{10, several},
	{4, func(w *worker) { w.takeUpTo(w.request([]string{"still", "flow", "window", "tight"}[w.random.IntN(4)])) }},
	{4, (*worker).borrow},
	{4, (*worker).price},
	{4, (*worker).correct},
	{2, (*worker).wait},
	{3, func(w *worker) { w.look(w.random) }},
	{6, (*worker).reservation},
	{4, (*worker).ready},
	{4, (*worker).slot},
	{2, (*worker).hold},
	{2, func(w *worker) {
		w.require(w.request([]string{"still", "tight", "year", "tightSliding"}[w.random.IntN(4)]))
	}},
	{1, (*worker).reset},
	{1, one("reset")},
	{4, inTxAt("rc")},
	{4, inTxAt("rr")},
	{4, inTxAt("ser")},
	{4, inTxAt("intx")},
	{3, inTxAt("sharedqueues")},
}

// races returns what the i-th worker of a race does: most take outside of transactions, as these are quick, and some do
// nothing but transactions of one kind.
func races(i int) []action {
	if paths := []string{"rc", "rr", "ser", "intx", "sharedqueues"}; i%128 < len(paths) {
		return []action{{1, inTxAt(paths[i%128])}}
	}
	return []action{
		{8, one("still", "stillShards", "stillWindow", "stillSliding", "year")},
		{10, one("tight", "tightShards", "tightSliding")},
		{10, one("flow", "flowShards", "window", "sliding")},
		{4, one("ahead", "windowAhead", "tightAhead")},
		{1, several},
	}
}

// reservation makes a reservation, and continues it in one of several ways. Sometimes it is never ended.
func (w *worker) reservation() {
	limiter, path := w.limiter()
	wishes := []wish{w.request("reserved")}
	if w.random.IntN(2) == 0 {
		wishes = append(wishes, w.request("released"))
	}
	items, requests := itemsOf(wishes)
	id := w.call("reserve", path, items, func(ctx context.Context, e *entry) error {
		r, err := limiter.Reserve(ctx, requests...)
		if err != nil {
			return err
		}
		e.id = r.ID
		return note(e, wishes, r.Decision)
	}).id
	if id == "" {
		return
	}
	// Another Limiter may go on with it.
	limiter, path = w.limiter()
	end := func(verb string, items []item, do func(ctx context.Context) error) outcome {
		return w.callOn(id, verb, path, items, func(ctx context.Context, _ *entry) error { return do(ctx) }).outcome
	}
	start := func(ctx context.Context) error {
		if _, err := limiter.Start(ctx, id); err != nil {
			return err
		}
		_, err := limiter.Started(ctx, id)
		return err
	}
	cancel := func(ctx context.Context) error { return limiter.Cancel(ctx, id) }
	settle := func() {
		actual := wishes[0]
		actual.cost = float64(w.random.IntN(6))
		end("settle", []item{actual.item()}, func(ctx context.Context) error { return limiter.Settle(ctx, id, actual.request()) })
	}
	switch w.random.IntN(8) {
	case 0: // it stays open
	case 1, 2:
		end("cancel", nil, cancel)
	case 3:
		if end("cancel", nil, cancel) == allowed {
			renew := func(ctx context.Context) error { _, err := limiter.Renew(ctx, id); return err }
			if end("renew", nil, renew) == allowed && w.random.IntN(2) == 0 {
				settle()
			}
		}
	default:
		if end("start", nil, start) == allowed {
			settle()
		}
	}
}

// ready makes a reservation of tokens that are not available yet, and never ends it: it is ready at some instant, and stays paid.
func (w *worker) ready() {
	of := w.request("ready")
	limiter, path := w.limiters[0], w.paths[0] // not the one whose reservations are given back
	w.call("reserve", path, []item{of.item()}, func(ctx context.Context, e *entry) error {
		r, err := limiter.Reserve(ctx, of.request())
		if err != nil {
			return err
		}
		if err := note(e, []wish{of}, r.Decision); err != nil || !r.Allowed {
			return err
		}
		e.id, e.items[0].lo = r.ID, r.ReadyAt.UnixMicro()
		return nil
	})
}

// slot holds slots while it takes something else, and gives them back or lets the lease end.
func (w *worker) slot() {
	of, with := w.request("slots"), w.request("still")
	of.cost = float64(1 + w.random.IntN(2))
	limiter, path := w.limiter()
	var held ratelimit.Lease
	acquired := w.call("acquire", path, []item{with.item()}, func(ctx context.Context, e *entry) error {
		lease, err := limiter.Acquire(ctx, of.request(), with.request())
		if err != nil {
			return err
		}
		held = lease
		err = note(e, []wish{of, with}, lease.Decision)
		if lease.Allowed {
			e.items = e.items[1:]
		}
		return err
	})
	if acquired.outcome != allowed {
		return
	}
	from, until := now(), held.Until.UnixMicro()
	for range w.random.IntN(3) {
		one("still", "flow")(w)
	}
	renewed := held
	renew := func(ctx context.Context, _ *entry) (err error) {
		renewed, err = limiter.RenewLease(ctx, held.ID)
		return err
	}
	if w.random.IntN(2) == 0 && w.call("renewLease", path, nil, renew).outcome == allowed {
		until = max(until, renewed.Until.UnixMicro())
		one("still", "flow")(w)
	}
	if w.random.IntN(8) > 0 {
		until = min(until, now()) // it may be given back from here on
		w.call("release", path, nil, func(ctx context.Context, _ *entry) error { return limiter.Release(ctx, held.ID) })
	}
	w.held(acquired, of, from, until)
}

// hold holds a slot while a function runs, and has it renewed.
func (w *worker) hold() {
	of := w.request("slots")
	of.cost = 1
	limiter, path := w.limiter()
	w.call("hold", path, nil, func(ctx context.Context, e *entry) error {
		return limiter.Hold(ctx, func(_ context.Context, lease ratelimit.Lease) error {
			from := now()
			for range w.random.IntN(4) {
				one("still", "flow")(w)
			}
			// Whether it was renewed is not told, and that it was lost may be heard late.
			w.held(e, of, from, min(now(), lease.Until.UnixMicro()))
			return nil
		}, of.request())
	})
}

// held writes that slots were held for certain from an instant to another.
func (w *worker) held(e *entry, of wish, from, until int64) {
	if from < until {
		w.write(&entry{begin: from, end: until, call: e.call, verb: "held", path: e.path, outcome: allowed, times: 1, items: []item{
			{name: of.Name(), key: of.key, tokens: of.cost, lo: from, hi: until},
		}})
	}
}

func now() int64 { return time.Now().UnixMicro() }

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
		limiter, path := w.limiter()
		w.call("prune", path, nil, func(ctx context.Context, _ *entry) error {
			_, err := limiter.Prune(ctx, w.catalog.unlimited...)
			return err
		})
		w.call("expire", path, nil, func(ctx context.Context, _ *entry) error {
			_, err := limiter.Expire(ctx)
			return err
		})
		w.call("rule", path, nil, func(ctx context.Context, _ *entry) error {
			capacity := float64(5 + w.random.IntN(mostRuled-4))
			rule := rules.Rule{Limit: "ruled", Policy: ratelimit.TokenBucket{Rate: float64(5 + w.random.IntN(mostRuled-4)), Period: time.Second, Capacity: capacity}}
			_, err := w.store.Put(ctx, rules.Edit{Author: "torture", Reason: "to see what it does"}, rule)
			return err
		})
	}
}
