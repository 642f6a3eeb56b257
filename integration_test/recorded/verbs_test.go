package recorded_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/take"
)

// The outcomes of a call.
const (
	allowed = iota
	refused
	failed
	outcomes
)

func outcomeNames() [outcomes]string { return [outcomes]string{"allowed", "refused", "error"} }

// verb is a method of Limiter, or a function of package take. Its call writes the requests and the answer, and returns
// the kinds of its limits.
type verb struct {
	name   string
	weight int
	call   func(ctx context.Context, h *history, d *draw) (named []int, outcome int, err error) // nil: it is called elsewhere
}

// verbs are the methods of Limiter, and the functions of package take. The order and the weights decide what histories
// do: new verbs go to the end, with some of the weight of others.
func verbs() []verb {
	return []verb{
		{"Take", 14, takeOrBorrow},
		{"TakeUpTo", 5, takeUpTo},
		{"Check", 3, decides("Check", (*ratelimit.Limiter).Check)},
		{"Require", 4, does("Require", (*ratelimit.Limiter).Require)},
		{"Wait", 3, wait},
		{"Reserve", 7, reserve},
		{"CheckReserve", 2, checkReserve},
		{"Start", 3, start},
		{"Started", 2, started},
		{"Renew", 3, renew},
		{"Settle", 4, settleReserved},
		{"Cancel", 3, ends((*ratelimit.Limiter).Cancel)},
		{"Expire", 2, expire},
		{"Acquire", 8, acquire},
		{"RenewLease", 5, renewLease},
		{"Release", 5, release},
		{"Hold", 2, hold},
		{"Keep", 2, keep},
		{"Take", 5, decides("Take", (*ratelimit.Limiter).Take)}, // the weight of a verb that is gone
		{"Credit", 3, does("Credit", (*ratelimit.Limiter).Credit)},
		{"CreditTaken", 3, creditTaken},
		{"Charge", 4, does("Charge", (*ratelimit.Limiter).Charge)},
		{"Reset", 1, does("Reset", (*ratelimit.Limiter).Reset)},
		{"Value", 4, value},
		{"Resolve", 1, resolve},
		{"StoredKey", 1, storedKey},
		{"Prune", 1, prune},
		{"InTx", 0, nil}, // history.inTx
		{"Close", 1, closeAnother},
	}
}

// leftOut are the methods of Limiter that no history calls by itself, and why.
func leftOut() map[string]string {
	return map[string]string{
		"KeepAlive":         "is the verb Keep, its name when the histories were recorded",
		"WithTx":            "each call in a transaction is made on the Limiter that it returns",
		"HasPolicies":       "returns a part of the Config",
		"InTransaction":     "returns whether WithTx made the Limiter",
		"Schema":            "returns a part of the Config",
		"Observe":           "tells the Observer what it is given",
		"Maintain":          "calls Expire and Prune; TestMaintain has its cases",
		"ChargeUntil":       "charges what Charge does, up to an instant; TestChargeUntil has its cases",
		"MarshalRequests":   "writes its requests as JSON; ExampleLimiter_MarshalRequests has its cases",
		"UnmarshalRequests": "reads them; ExampleLimiter_MarshalRequests has its cases",
		"Mode":              "returns the mode of what Resolve returns; TestModeFollowsTheErasAndThePause has its cases",
	}
}

func weights(all []verb) (sum int) {
	for i := range all {
		sum += all[i].weight
	}
	return sum
}

func (h *history) verbNamed(name string) int {
	return slices.IndexFunc(h.verbs, func(v verb) bool { return v.name == name })
}

// ask is a request.
type ask struct {
	limit   *limit
	request ratelimit.Request
	text    string
	kind    int
}

// draw draws requests for a verb, mostly valid ones.
func (h *history) draw(d *draw, verb string) (asked []ask) {
	most := 1 + d.below(d.below(3)+1)
	for range most {
		l := h.limits[d.below(len(h.limits))]
		for tries := 0; tries < 3 && !suits(verb, l.kind) && (len(asked) == 0 || verb != "Acquire" && verb != "Hold"); tries++ {
			l = h.limits[d.below(len(h.limits))]
		}
		asked = append(asked, h.ask(d, l, verb))
	}
	if d.oneIn(60) {
		return nil
	}
	for _, a := range asked {
		h.base.Resolve(a.request) // which reports a second definition of the name before the call does
	}
	return asked
}

// suits reports whether a verb is for a kind.
func suits(verb string, kind int) bool {
	switch verb {
	case "Acquire", "Hold":
		return kind == kindSlots
	case "Reserve", "CheckReserve", "Wait":
		return kind != kindSlots && kind != kindSliding
	case "Take", "TakeUpTo", "Require", "Charge", "Credit", "CreditTaken":
		return kind != kindSlots
	}
	return true
}

// ask draws a request for a limit.
func (h *history) ask(d *draw, l *limit, verb string) ask {
	key := h.keys[d.below(len(h.keys))]
	if d.oneIn(4) {
		key = h.keys[0]
	}
	cost := float64(1 + d.below(max(1, int(l.most*0.6))))
	switch d.below(30) {
	case 0:
		cost = 0
	case 1, 2:
		cost = l.most
	case 3, 4:
		cost *= 0.75
		if l.kind == kindShards { // so that what rows hold is exact
			cost = 0.5
		}
	case 5:
		cost = l.most + 1
	case 6:
		cost = oneOf(d, -1, math.NaN(), math.Inf(1), 1e-300)
	}
	if verb == "Acquire" || verb == "Hold" {
		cost = float64(oneOf(d, 1, 1, 1, 2, 3))
	}
	a := ask{l, l.now().For(key), fmt.Sprintf("%s %q %v", l.name, key, cost), l.kind}
	odd := 50
	if verb == "StoredKey" {
		odd = 6
	}
	switch d.below(odd) {
	case 0:
		a.request, a.text = l.now().Global(), fmt.Sprintf("%s global %v", l.name, cost)
	case 1:
		bad := oneOf(d, "", "\x00", "\xff", strings.Repeat("k", 257))
		a.request, a.text = l.now().For(bad), fmt.Sprintf("%s %.4q %v", l.name, bad, cost)
	case 2:
		a.request, a.text = l.defined[1-l.deployed].For(key), a.text+" otherwise"
	case 3:
		a.request, a.text = ratelimit.Limit{}.For(key), "no limit"
	}
	a.request = a.request.Cost(cost)
	if h.config.Policies != nil && d.oneIn(3) {
		a.request, a.text = a.request.Plan("pro"), a.text+" pro"
	}
	return a
}

// requests writes the asks, and returns them as requests.
func (h *history) requests(asked []ask) (requests []ratelimit.Request) {
	for _, a := range asked {
		h.text.WriteString(" [" + a.text + "]")
		requests = append(requests, a.request)
	}
	h.text.WriteString(" ->")
	return requests
}

func kindsOf(asked []ask) (named []int) {
	for _, a := range asked {
		named = append(named, a.kind)
	}
	if len(named) == 0 {
		named = []int{kindNone}
	}
	return named
}

// isInTx reports whether calls are in a transaction.
func (h *history) isInTx() bool { return h.level != noTransaction }

// outcome writes a decision, and returns its outcome.
func (h *history) outcome(d ratelimit.Decision, err error) int {
	if err != nil {
		return failed
	}
	h.text.decision(d, h.isInTx())
	if d.Allowed {
		h.taken = append(h.taken, d.At)
		return allowed
	}
	return refused
}

func decides(name string, call func(*ratelimit.Limiter, context.Context, ...ratelimit.Request) (ratelimit.Decision, error)) func(context.Context, *history, *draw) ([]int, int, error) {
	return func(ctx context.Context, h *history, d *draw) ([]int, int, error) {
		asked := h.draw(d, name)
		answer, err := call(h.in, ctx, h.requests(asked)...)
		return kindsOf(asked), h.outcome(answer, err), err
	}
}

// takeOrBorrow takes. In a history about borrowing it takes from a guarantee or a pool, one time in three.
func takeOrBorrow(ctx context.Context, h *history, d *draw) ([]int, int, error) {
	if h.about != aboutBorrow || !d.oneIn(3) {
		return decides("Take", (*ratelimit.Limiter).Take)(ctx, h, d)
	}
	own, pool := h.ask(d, h.limits[d.below(len(h.limits))], "Take"), h.ask(d, h.limits[d.below(len(h.limits))], "Take")
	tokens := oneOf(d, 0, 0.5, 1, 2, 3, 6.0, 100)
	requests := h.requests([]ask{own, pool})
	h.text.number("borrows", tokens)
	answer, err := take.Borrow(ctx, h.in, tokens, requests[0], requests[1])
	return []int{kindBorrow}, h.outcome(answer, err), err
}

// does is for verbs that answer with an error alone.
func does(name string, call func(*ratelimit.Limiter, context.Context, ...ratelimit.Request) error) func(context.Context, *history, *draw) ([]int, int, error) {
	return func(ctx context.Context, h *history, d *draw) ([]int, int, error) {
		asked := h.draw(d, name)
		err := call(h.in, ctx, h.requests(asked)...)
		var limited *ratelimit.LimitedError
		if errors.As(err, &limited) {
			h.text.decision(limited.Decision, h.isInTx())
		}
		return kindsOf(asked), allowed, err
	}
}

func takeUpTo(ctx context.Context, h *history, d *draw) ([]int, int, error) {
	asked, n := h.draw(d, "TakeUpTo"), oneOf(d, 1, 2, 3, 5, 100, 0)
	h.text.number("n", float64(n))
	taken, answer, err := take.UpTo(ctx, h.in, n, h.requests(asked)...)
	h.text.number("taken", float64(taken))
	return kindsOf(asked), h.outcome(answer, err), err
}

// wait waits for at most an hour, or until it is given up.
func wait(ctx context.Context, h *history, d *draw) ([]int, int, error) {
	asked := h.draw(d, "Wait")
	most := oneOf(d, 0, time.Second, 10*time.Second, time.Minute, time.Hour) + 333*time.Microsecond
	bounded, cancel := context.WithTimeout(ctx, most)
	if d.oneIn(3) {
		bounded, cancel = context.WithCancel(ctx)
		time.AfterFunc(most, cancel)
	}
	defer cancel()
	h.text.span("most", most)
	began := h.now()
	answer, err := take.Wait(bounded, h.in, h.requests(asked)...)
	h.text.span("waited", h.now().Sub(began))
	return kindsOf(asked), h.outcome(answer, err), err
}

func (h *history) reservation(r ratelimit.Reservation, err error) int {
	outcome := h.outcome(r.Decision, err)
	h.text.instant("ready", r.ReadyAt)
	h.text.instant("stale", r.StaleAt)
	return outcome
}

func reserve(ctx context.Context, h *history, d *draw) ([]int, int, error) {
	asked := h.draw(d, "Reserve")
	r, err := h.in.Reserve(ctx, h.requests(asked)...)
	outcome := h.reservation(r, err)
	h.text.flag("id", r.ID != "")
	if r.ID != "" {
		h.reservations = append(h.reservations, ticket{id: r.ID, kinds: kindsOf(asked), asked: asked})
	}
	return kindsOf(asked), outcome, err
}

func checkReserve(ctx context.Context, h *history, d *draw) ([]int, int, error) {
	asked := h.draw(d, "CheckReserve")
	r, err := h.in.CheckReserve(ctx, h.requests(asked)...)
	return kindsOf(asked), h.reservation(r, err), err
}

// pick returns one of the latest tickets, or a ticket with an unknown ID.
func (h *history) pick(d *draw, of []ticket, unknown string) ticket {
	n, which, none := len(of), d.next(), d.oneIn(20)
	if n == 0 || none {
		h.text.WriteString(" unknown ->")
		return ticket{id: unknown, kinds: []int{kindNone}}
	}
	i := n - 1 - int(which%uint64(min(n, 4)))
	fmt.Fprintf(&h.text, " #%d ->", i)
	return of[i]
}

const noReservation = "00000000-0000-4000-8000-000000000000"

func (h *history) reserved(d *draw) ticket { return h.pick(d, h.reservations, noReservation) }

// outcomeOf writes a slot, and returns whether the work may run now.
func (h *history) outcomeOf(s ratelimit.Turn, err error) int {
	if err != nil {
		return failed
	}
	h.text.slot(s)
	if s.Wait > 0 {
		return refused
	}
	return allowed
}

func start(ctx context.Context, h *history, d *draw) ([]int, int, error) {
	of := h.reserved(d)
	s, err := h.in.Start(ctx, of.id)
	return of.kinds, h.outcomeOf(s, err), err
}

func renew(ctx context.Context, h *history, d *draw) ([]int, int, error) {
	of := h.reserved(d)
	s, err := h.in.Renew(ctx, of.id)
	return of.kinds, h.outcomeOf(s, err), err
}

func started(ctx context.Context, h *history, d *draw) ([]int, int, error) {
	of := h.reserved(d)
	is, err := h.in.Started(ctx, of.id)
	h.text.flag("started", is)
	if is {
		return of.kinds, allowed, err
	}
	return of.kinds, refused, err
}

func ends(call func(*ratelimit.Limiter, context.Context, string) error) func(context.Context, *history, *draw) ([]int, int, error) {
	return func(ctx context.Context, h *history, d *draw) ([]int, int, error) {
		of := h.reserved(d)
		return of.kinds, allowed, call(h.in, ctx, of.id)
	}
}

// settleReserved settles at other costs than were reserved, and at times for another bucket.
func settleReserved(ctx context.Context, h *history, d *draw) ([]int, int, error) {
	of := h.reserved(d)
	var actual []ask
	for _, a := range of.asked {
		if d.oneIn(2) {
			cost := oneOf(d, 0, 0.5, 1, 3, a.limit.most)
			actual = append(actual, ask{a.limit, a.request.Cost(cost), fmt.Sprintf("%s at %v", a.text, cost), a.kind})
		}
	}
	if d.oneIn(8) { // one alone: which of several the error names is random
		actual = []ask{h.oneAsk(d, "Settle")}
	}
	return of.kinds, allowed, h.in.Settle(ctx, of.id, h.requests(actual)...)
}

func expire(ctx context.Context, h *history, _ *draw) ([]int, int, error) {
	n, err := h.in.Expire(ctx)
	h.text.number("ended", float64(n))
	return []int{kindNone}, allowed, err
}

func (h *history) lease(l ratelimit.Lease) {
	h.text.field("id", l.ID)
	h.text.number("fence", float64(l.Fence))
	h.text.instant("until", l.Until)
}

func acquire(ctx context.Context, h *history, d *draw) ([]int, int, error) {
	asked := h.draw(d, "Acquire")
	l, err := h.in.Acquire(ctx, h.requests(asked)...)
	outcome := h.outcome(l.Decision, err)
	h.bounded = h.bounded || h.level == serializable && outcome == refused
	if h.lease(l); l.ID != "" {
		h.leases = append(h.leases, ticket{id: l.ID, lease: l, kinds: kindsOf(asked)})
	}
	return kindsOf(asked), outcome, err
}

// leased returns a lease, or a ticket with an unknown ID.
func (h *history) leased(d *draw) ticket {
	unknown := oneOf(d, "", "no lease")
	return h.pick(d, h.leases, unknown)
}

func renewLease(ctx context.Context, h *history, d *draw) ([]int, int, error) {
	of := h.leased(d)
	l, err := h.in.RenewLease(ctx, of.id)
	h.lease(l)
	return of.kinds, allowed, err
}

func release(ctx context.Context, h *history, d *draw) ([]int, int, error) {
	of := h.leased(d)
	return of.kinds, allowed, h.in.Release(ctx, of.id)
}

// hold holds slots for a while that may be longer than the lease.
func hold(ctx context.Context, h *history, d *draw) ([]int, int, error) {
	asked, while, fails := h.draw(d, "Hold"), d.span(oneOf(d, time.Second, 30*time.Second))+333*time.Nanosecond, d.oneIn(4)
	h.text.span("while", while)
	err := h.in.Hold(ctx, func(ctx context.Context, l ratelimit.Lease) error {
		h.outcome(l.Decision, nil)
		h.lease(l)
		time.Sleep(while)
		h.text.flag("over", ctx.Err() != nil)
		if fails {
			return errOwn
		}
		return nil
	}, h.requests(asked)...)
	return kindsOf(asked), allowed, err
}

// keep keeps a lease for a while.
func keep(ctx context.Context, h *history, d *draw) ([]int, int, error) {
	of, while := h.leased(d), d.span(20*time.Second)+333*time.Nanosecond
	h.text.span("while", while)
	held, release := h.in.KeepAlive(ctx, of.lease)
	if !h.isInTx() {
		time.Sleep(while)
	}
	h.text.flag("over", held.Err() != nil)
	release()
	err := context.Cause(held)
	if errors.Is(err, context.Canceled) && ctx.Err() == nil {
		err = nil // by release
	}
	return of.kinds, allowed, err
}

func creditTaken(ctx context.Context, h *history, d *draw) ([]int, int, error) {
	at := h.now().Add(-d.span(20 * time.Second))
	if n, which := len(h.taken), d.next(); n > 0 {
		at = h.taken[n-1-int(which%uint64(min(n, 4)))]
	}
	h.text.instant("at", at)
	asked := h.draw(d, "CreditTaken")
	return kindsOf(asked), allowed, h.in.CreditTaken(ctx, at, h.requests(asked)...)
}

// oneAsk draws one request.
func (h *history) oneAsk(d *draw, verb string) ask {
	if asked := h.draw(d, verb); len(asked) > 0 {
		return asked[0]
	}
	return h.ask(d, h.limits[0], verb)
}

func value(ctx context.Context, h *history, d *draw) ([]int, int, error) {
	a, ahead, cost := h.oneAsk(d, "Value"), d.span(10*time.Second), float64(d.below(6))
	v, err := h.in.Value(ctx, h.requests([]ask{a})[0])
	if err == nil {
		h.text.value(v, h.isInTx())
		h.text.projected(v, v.AsOf.Add(ahead), cost)
	}
	return []int{a.kind}, allowed, err
}

func resolve(_ context.Context, h *history, d *draw) ([]int, int, error) {
	a := h.oneAsk(d, "Resolve")
	r := h.requests([]ask{a})[0]
	h.text.field("limit", h.in.Resolve(r).String())
	if full := r.FullValue(h.now()); a.kind != kindCalendar {
		h.text.value(full, false)
	}
	return []int{a.kind}, allowed, nil
}

func storedKey(_ context.Context, h *history, d *draw) ([]int, int, error) {
	a := h.oneAsk(d, "StoredKey")
	key, err := h.in.StoredKey(h.requests([]ask{a})[0])
	h.text.field("key", key)
	return []int{a.kind}, allowed, err
}

// prune prunes. It does not write the number of rows of full buckets, which may differ.
func prune(ctx context.Context, h *history, d *draw) ([]int, int, error) {
	var limits []ratelimit.Limit
	var named []int
	for _, l := range h.limits {
		if !d.oneIn(4) {
			limits, named = append(limits, l.now()), append(named, l.kind)
		}
	}
	if len(named) == 0 {
		named = []int{kindNone}
	}
	_, err := h.in.Prune(ctx, limits...)
	return named, allowed, err
}

// closeAnother closes another Limiter on the same buckets, and calls it.
func closeAnother(ctx context.Context, h *history, d *draw) ([]int, int, error) {
	if h.isInTx() { // a call outside would wait for rows that are locked
		return []int{kindNone}, allowed, h.in.Close(ctx)
	}
	other, err := ratelimit.New(h.pool, h.config)
	if err != nil {
		return nil, failed, err
	}
	asked := h.draw(d, "Take")
	requests := h.requests(asked)
	answer, err := other.Take(ctx, requests...)
	if err != nil {
		h.text.failure(err)
	} else {
		h.text.decision(answer, false)
	}
	if err := other.Close(ctx); err != nil {
		return []int{kindNone}, failed, err
	}
	if len(requests) > 0 {
		_, err = other.Take(ctx, requests...)
	}
	return []int{kindNone}, allowed, err
}
