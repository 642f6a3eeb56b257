package histories_test

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

// verb is a method of Limiter, or a function of package take. Its call writes the requests and the answer.
type verb struct {
	name   string
	weight int
	call   func(ctx context.Context, h *history, d *draw) error
}

// calls are the verbs of a history.
func calls() []verb {
	return []verb{
		{"Take", 16, decides("Take", (*ratelimit.Limiter).Take)},
		{"Borrow", 3, borrow},
		{"TakeUpTo", 3, takeUpTo},
		{"Check", 3, decides("Check", (*ratelimit.Limiter).Check)},
		{"Require", 4, does("Require", (*ratelimit.Limiter).Require)},
		{"Wait", 2, wait},
		{"Reserve", 9, reserve},
		{"CheckReserve", 2, checkReserve},
		{"Start", 3, start},
		{"Started", 2, started},
		{"Renew", 3, renew},
		{"Settle", 9, settleReserved},
		{"Cancel", 5, cancelReserved},
		{"Expire", 2, expire},
		{"Acquire", 8, acquire},
		{"RenewLease", 5, renewLease},
		{"Release", 5, release},
		{"Hold", 2, hold},
		{"KeepAlive", 2, keep},
		{"Credit", 3, does("Credit", (*ratelimit.Limiter).Credit)},
		{"CreditTaken", 3, creditTaken},
		{"Charge", 4, does("Charge", (*ratelimit.Limiter).Charge)},
		{"ChargeUntil", 2, chargeUntil},
		{"Reset", 1, does("Reset", (*ratelimit.Limiter).Reset)},
		{"Value", 4, value},
		{"Resolve", 1, resolve},
		{"StoredKey", 1, storedKey},
		{"Prune", 1, prune},
		{"Close", 1, closeAnother},
	}
}

// ask is a request.
type ask struct {
	limit   *limit
	request ratelimit.Request
	text    string
}

// asks draws requests for a verb, mostly valid ones.
func (h *history) asks(d *draw, verb string) (asked []ask) {
	most := 1 + d.IntN(d.IntN(3)+1)
	for range most {
		l := h.limits[d.IntN(len(h.limits))]
		for tries := 0; tries < 3 && !suits(verb, l.kind) && (len(asked) == 0 || verb != "Acquire" && verb != "Hold"); tries++ {
			l = h.limits[d.IntN(len(h.limits))]
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
func suits(verb string, kind kind) bool {
	switch verb {
	case "Acquire", "Hold":
		return kind == slots
	case "Reserve", "CheckReserve", "Wait":
		return kind != slots && kind != sliding
	case "Take", "TakeUpTo", "Require", "Charge", "ChargeUntil", "Credit", "CreditTaken":
		return kind != slots
	}
	return true
}

// ask draws a request for a limit.
func (h *history) ask(d *draw, l *limit, verb string) ask {
	key := h.keys[d.IntN(len(h.keys))]
	if d.oneIn(4) {
		key = h.keys[0]
	}
	cost := float64(1 + d.IntN(max(1, int(l.most*0.6))))
	switch d.IntN(30) {
	case 0:
		cost = 0
	case 1, 2:
		cost = l.most
	case 3, 4:
		cost *= 0.75
	case 5:
		cost = l.most + 1
	case 6:
		cost = oneOf(d, -1, math.NaN(), math.Inf(1), 1e-300)
	}
	if verb == "Acquire" || verb == "Hold" {
		cost = float64(oneOf(d, 1, 1, 1, 2, 3))
	}
	a := ask{l, l.now().For(key), fmt.Sprintf("%s %q %v", l.name, key, cost)}
	odd := 50
	if verb == "StoredKey" {
		odd = 6
	}
	switch d.IntN(odd) {
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
	if d.oneIn(4) && strings.HasSuffix(verb, "Reserve") {
		most := d.span(30 * time.Second)
		a.request, a.text = a.request.MaxWait(most), fmt.Sprintf("%s within %v", a.text, most)
	}
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

// isInTx reports whether calls are in a transaction.
func (h *history) isInTx() bool { return h.level != noTransaction }

// decided writes a decision.
func (h *history) decided(d ratelimit.Decision, err error) error {
	if err != nil {
		return err
	}
	if h.text.decision(d, h.isInTx()); d.Allowed {
		h.taken = append(h.taken, d.At)
	}
	return nil
}

func decides(name string, call func(*ratelimit.Limiter, context.Context, ...ratelimit.Request) (ratelimit.Decision, error)) func(context.Context, *history, *draw) error {
	return func(ctx context.Context, h *history, d *draw) error {
		return h.decided(call(h.in, ctx, h.requests(h.asks(d, name))...))
	}
}

// borrow takes from a guarantee or a pool.
func borrow(ctx context.Context, h *history, d *draw) error {
	own, pool := h.ask(d, h.limits[d.IntN(len(h.limits))], "Take"), h.ask(d, h.limits[d.IntN(len(h.limits))], "Take")
	tokens := oneOf(d, 0, 0.5, 1, 2, 3, 6.0, 100)
	requests := h.requests([]ask{own, pool})
	h.text.number("borrows", tokens)
	return h.decided(take.Borrow(ctx, h.in, tokens, requests[0], requests[1]))
}

// does is for verbs that answer with an error alone.
func does(name string, call func(*ratelimit.Limiter, context.Context, ...ratelimit.Request) error) func(context.Context, *history, *draw) error {
	return func(ctx context.Context, h *history, d *draw) error {
		err := call(h.in, ctx, h.requests(h.asks(d, name))...)
		var limited *ratelimit.LimitedError
		if errors.As(err, &limited) {
			h.text.decision(limited.Decision, h.isInTx())
		}
		return err
	}
}

func takeUpTo(ctx context.Context, h *history, d *draw) error {
	asked, n := h.asks(d, "TakeUpTo"), oneOf(d, 1, 2, 3, 5, 100, 0)
	h.text.number("n", float64(n))
	taken, answer, err := take.UpTo(ctx, h.in, n, h.requests(asked)...)
	h.text.number("taken", float64(taken))
	return h.decided(answer, err)
}

// wait waits for at most an hour, or until it is given up.
func wait(ctx context.Context, h *history, d *draw) error {
	asked := h.asks(d, "Wait")
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
	return h.decided(answer, err)
}

func (h *history) reserved(r ratelimit.Reservation, err error) error {
	err = h.decided(r.Decision, err)
	h.text.instant("ready", r.ReadyAt)
	h.text.instant("stale", r.StaleAt)
	return err
}

func reserve(ctx context.Context, h *history, d *draw) error {
	asked := h.asks(d, "Reserve")
	r, err := h.in.Reserve(ctx, h.requests(asked)...)
	if h.text.flag("id", r.ID != ""); r.ID != "" {
		h.reservations = append(h.reservations, ticket{id: r.ID, asked: asked})
	}
	return h.reserved(r, err)
}

func checkReserve(ctx context.Context, h *history, d *draw) error {
	return h.reserved(h.in.CheckReserve(ctx, h.requests(h.asks(d, "CheckReserve"))...))
}

// pick returns one of the latest tickets, or a ticket with an unknown ID.
func (h *history) pick(d *draw, of []ticket, unknown string) ticket {
	n := len(of)
	if d.oneIn(20) || n == 0 {
		h.text.WriteString(" unknown ->")
		return ticket{id: unknown}
	}
	i := n - 1 - d.IntN(min(n, 4))
	fmt.Fprintf(&h.text, " #%d ->", i)
	return of[i]
}

const noReservation = "00000000-0000-4000-8000-000000000000"

func (h *history) reservation(d *draw) ticket { return h.pick(d, h.reservations, noReservation) }

// lastReservation returns a reservation for a call that ends it. Mostly no later call gets the same one.
func (h *history) lastReservation(d *draw) ticket {
	of := h.reservation(d)
	if !d.oneIn(3) {
		h.reservations = slices.DeleteFunc(h.reservations, func(r ticket) bool { return r.id == of.id })
	}
	return of
}

// turn writes a turn.
func (h *history) turn(s ratelimit.Turn, err error) error {
	if err == nil {
		h.text.turn(s)
	}
	return err
}

func start(ctx context.Context, h *history, d *draw) error {
	return h.turn(h.in.Start(ctx, h.reservation(d).id))
}

func renew(ctx context.Context, h *history, d *draw) error {
	return h.turn(h.in.Renew(ctx, h.reservation(d).id))
}

func started(ctx context.Context, h *history, d *draw) error {
	is, err := h.in.Started(ctx, h.reservation(d).id)
	h.text.flag("started", is)
	return err
}

func cancelReserved(ctx context.Context, h *history, d *draw) error {
	return h.in.Cancel(ctx, h.lastReservation(d).id)
}

// settleReserved settles at other costs than were reserved, and at times for another bucket.
func settleReserved(ctx context.Context, h *history, d *draw) error {
	of := h.lastReservation(d)
	var actual []ask
	for _, a := range of.asked {
		if d.oneIn(2) {
			cost := oneOf(d, 0, 0.5, 1, 3, a.limit.most)
			actual = append(actual, ask{a.limit, a.request.Cost(cost), fmt.Sprintf("%s at %v", a.text, cost)})
		}
	}
	if d.oneIn(8) { // one alone: which of several the error names is random
		actual = []ask{h.oneAsk(d, "Settle")}
	}
	return h.in.Settle(ctx, of.id, h.requests(actual)...)
}

func expire(ctx context.Context, h *history, _ *draw) error {
	n, err := h.in.Expire(ctx)
	h.text.number("ended", float64(n))
	return err
}

func (h *history) lease(l ratelimit.Lease) {
	h.text.field("id", l.ID)
	h.text.number("fence", float64(l.Fence))
	h.text.instant("until", l.Until)
}

func acquire(ctx context.Context, h *history, d *draw) error {
	l, err := h.in.Acquire(ctx, h.requests(h.asks(d, "Acquire"))...)
	h.bounded = h.bounded || h.level == serializable && err == nil && !l.Allowed
	if h.lease(l); l.ID != "" {
		h.leases = append(h.leases, ticket{id: l.ID, lease: l})
	}
	return h.decided(l.Decision, err)
}

// leased returns a lease, or a ticket with an unknown ID.
func (h *history) leased(d *draw) ticket { return h.pick(d, h.leases, oneOf(d, "", "no lease")) }

func renewLease(ctx context.Context, h *history, d *draw) error {
	l, err := h.in.RenewLease(ctx, h.leased(d).id)
	h.lease(l)
	return err
}

func release(ctx context.Context, h *history, d *draw) error {
	return h.in.Release(ctx, h.leased(d).id)
}

// hold holds slots for a while that may be longer than the lease.
func hold(ctx context.Context, h *history, d *draw) error {
	asked, while, fails := h.asks(d, "Hold"), d.span(oneOf(d, time.Second, 30*time.Second))+333*time.Nanosecond, d.oneIn(4)
	h.text.span("while", while)
	return h.in.Hold(ctx, func(ctx context.Context, l ratelimit.Lease) error {
		_ = h.decided(l.Decision, nil)
		h.lease(l)
		time.Sleep(while)
		h.text.flag("over", ctx.Err() != nil)
		if fails {
			return errOwn
		}
		return nil
	}, h.requests(asked)...)
}

// keep keeps a lease for a while.
func keep(ctx context.Context, h *history, d *draw) error {
	of, while := h.leased(d), d.span(20*time.Second)+333*time.Nanosecond
	h.text.span("while", while)
	held, release := h.in.KeepAlive(ctx, of.lease)
	if !h.isInTx() {
		time.Sleep(while)
	}
	h.text.flag("over", held.Err() != nil)
	release()
	if err := context.Cause(held); !errors.Is(err, context.Canceled) || ctx.Err() != nil {
		return err
	}
	return nil // canceled by release
}

func creditTaken(ctx context.Context, h *history, d *draw) error {
	at := h.now().Add(-d.span(20 * time.Second))
	if n := len(h.taken); n > 0 {
		at = h.taken[n-1-d.IntN(min(n, 4))]
	}
	h.text.instant("at", at)
	return h.in.CreditTaken(ctx, at, h.requests(h.asks(d, "CreditTaken"))...)
}

func chargeUntil(ctx context.Context, h *history, d *draw) error {
	until := h.now().Add(d.span(30*time.Second) - 2*time.Second)
	h.text.instant("until", until)
	end, err := h.in.ChargeUntil(ctx, until, h.requests([]ask{h.oneAsk(d, "ChargeUntil")})[0])
	h.text.instant("end", end)
	return err
}

// oneAsk draws one request.
func (h *history) oneAsk(d *draw, verb string) ask {
	if asked := h.asks(d, verb); len(asked) > 0 {
		return asked[0]
	}
	return h.ask(d, h.limits[0], verb)
}

func value(ctx context.Context, h *history, d *draw) error {
	a, ahead, cost := h.oneAsk(d, "Value"), d.span(10*time.Second), float64(d.IntN(6))
	v, err := h.in.Value(ctx, h.requests([]ask{a})[0])
	if err == nil {
		h.text.tokens(v)
		h.text.projected(v, v.AsOf.Add(ahead), cost)
	}
	return err
}

func resolve(_ context.Context, h *history, d *draw) error {
	h.text.field("limit", h.in.Resolve(h.requests([]ask{h.oneAsk(d, "Resolve")})[0]).String())
	return nil
}

func storedKey(_ context.Context, h *history, d *draw) error {
	key, err := h.in.StoredKey(h.requests([]ask{h.oneAsk(d, "StoredKey")})[0])
	h.text.field("key", key)
	return err
}

// prune prunes. It does not write the number of rows of full buckets, which may differ.
func prune(ctx context.Context, h *history, d *draw) error {
	var limits []ratelimit.Limit
	for _, l := range h.limits {
		if !d.oneIn(4) {
			limits = append(limits, l.now())
		}
	}
	_, err := h.in.Prune(ctx, limits...)
	return err
}

// closeAnother closes another Limiter on the same buckets, and calls it.
func closeAnother(ctx context.Context, h *history, d *draw) error {
	if h.isInTx() { // a call outside would wait for rows that are locked
		return h.in.Close(ctx)
	}
	other, err := ratelimit.New(h.pool, h.config)
	if err != nil {
		return err
	}
	requests := h.requests(h.asks(d, "Take"))
	if answer, err := other.Take(ctx, requests...); err != nil {
		h.text.failure(err)
	} else {
		h.text.decision(answer, false)
	}
	if err := other.Close(ctx); err != nil {
		return err
	}
	if _, err = other.Take(ctx, requests...); errors.Is(err, ratelimit.ErrClosed) {
		return nil
	}
	return err
}

// instead returns another verb if verb has nothing to work on in this world.
func (h *history) instead(d *draw, verb string) string {
	switch verb {
	case "Start", "Started", "Renew", "Settle", "Cancel":
		if len(h.reservations) == 0 {
			return "Reserve"
		}
	case "Acquire", "Hold":
		if !slices.ContainsFunc(h.limits, func(l *limit) bool { return l.kind == slots }) {
			return oneOf(d, "Take", "Reserve")
		}
	case "RenewLease", "Release", "KeepAlive":
		if len(h.leases) == 0 {
			return h.instead(d, "Acquire")
		}
	}
	return verb
}
