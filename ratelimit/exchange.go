package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// Outcome is what an upstream made of a request.
type Outcome struct {
	// Throttled is whether it was refused because there were too many, as with the HTTP status 429.
	Throttled bool
	// RetryAfter is how long the upstream wants no requests, as its Retry-After says; 0 where it does not say. The key is
	// paused meanwhile, in all processes, when its policy has Apply. More than a day counts as a day.
	RetryAfter time.Duration
}

// Report notes what the upstream behind an [Adaptive] limit made of a request, which counts with its cost. Report each request
// once, those that were accepted too, and none that the limit refused.
//
// It returns at once: outcomes are counted in memory, and four times an epoch one call has them written to the database, beside
// the calls. On a single connection in place of a pool that call waits for it. A write that fails is told the Observer as a
// [Failed], and what it was to write is written next time, unless it may have been written. What a process has counted
// and not written is lost with it. Report counts whatever has become of ctx. In a transaction it counts, too, and is not
// undone: it is about the upstream. While another transaction has locked the row of a key, the outcomes of that key stay in memory,
// and the outcomes of other keys are written.
//
// It returns ErrInvalidRequest for a limit that is not Adaptive, and for a RetryAfter below 0, and the errors that Take finds
// before any SQL. Where a rule of Config.Policies has put another policy in place of an Adaptive one, nothing is counted.
func (l *Limiter) Report(ctx context.Context, request Request, o Outcome) error {
	const verb = "report"
	if err := l.ready(context.WithoutCancel(ctx), verb); err != nil {
		return err
	}
	if err := report(ctx, l, verb, &request, o); err != nil {
		return during(fmt.Sprintf("%s %q", verb, request.limit.Name()), err)
	}
	return nil
}

func report(ctx context.Context, l *Limiter, verb string, r *Request, o Outcome) error {
	key, err := storedKey(l.config.HashKey, r)
	if err != nil {
		return err
	}
	now := l.config.estimate()
	s, d := subjectOf(ctx, l, verb, r, key, &now)
	if err := checkCost(&d, r.cost, bucket.MaxTokens); err != nil {
		return err
	}
	if o.RetryAfter < 0 {
		return fmt.Errorf("%w: RetryAfter is %v; it is how long to wait, or 0", ErrInvalidRequest, o.RetryAfter)
	}
	policy, adapts := s.limit.Policy().(Adaptive)
	if !adapts {
		if _, was := r.limit.Policy().(Adaptive); was {
			return nil
		}
		return fmt.Errorf("%w: %v does not adapt; define the limit with an Adaptive policy", ErrInvalidRequest, s.limit)
	}
	u := l.prices.find(bucket.Key{Name: s.limit.Name(), Key: key}, now)
	if u == nil {
		return nil
	}
	u.use(policy, s.limit.terms())
	u.count(r.cost, o, now)
	l.prices.touch(ctx, u, now, l.pool == nil)
	return nil
}

// count counts an outcome.
func (u *upstream) count(cost float64, o Outcome, now int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.outcomes++
	if o.Throttled {
		u.throttled += cost
	} else {
		u.accepted += cost
	}
	if o.RetryAfter == 0 {
		return
	}
	until := now + min(o.RetryAfter, Day).Microseconds()
	if known := u.pausedUntil.Load(); until > known {
		u.pausedUntil.Store(until)
		if until > known+o.RetryAfter.Microseconds()/urgentExchanges { // news
			u.retryAt = max(u.retryAt, until)
		}
	}
}

const (
	// exchangeTimeout bounds an exchange, which nobody waits for.
	exchangeTimeout = 5 * time.Second
	// maxReports bounds the keys of an exchange, each of which is a row lock held for one round trip.
	maxReports = 500
)

// begin begins an exchange, unless one is under way. It goes on beside the call that begins it, with the values of its
// context. A single connection is for one call at a time, and only outside of transactions.
func (p *prices) begin(ctx context.Context, inTx bool) {
	single := p.limiter.isConnection
	if single && (inTx || notInTx(p.limiter.pool) != nil) {
		return
	}
	ctx = context.WithoutCancel(ctx)
	switch done := p.enter(); {
	case done == nil:
	case single:
		p.run(ctx, done)
	default:
		go p.run(ctx, done)
	}
}

// enter returns what is to be closed at the end of the exchange that the caller may begin, and nil when it may not.
func (p *prices) enter() chan struct{} {
	p.state.Lock()
	defer p.state.Unlock()
	if p.underWay != nil || p.closed {
		return nil
	}
	p.underWay = make(chan struct{})
	return p.underWay
}

// run runs an exchange.
func (p *prices) run(ctx context.Context, done chan struct{}) {
	defer func() {
		p.state.Lock()
		p.underWay = nil
		p.state.Unlock()
		close(done)
	}()
	p.exchange(ctx)
}

// close lets no more exchanges begin, and waits until that which is under way has ended, or ctx has.
func (p *prices) close(ctx context.Context) error {
	p.state.Lock()
	p.closed = true
	done := p.underWay
	p.state.Unlock()
	if done == nil {
		return nil
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// exchanged is a key in an exchange.
type exchanged struct {
	*upstream
	report   store.Report
	adapting bucket.Adapting
	pausedTo int64 // as was asked for since the exchange before; 0: it was not
	turned   bool  // whether this process has ended its epoch
}

// exchange tells the database what was reported of the keys for which it is time, and learns their prices.
func (p *prices) exchange(ctx context.Context) {
	l := p.limiter
	began := l.reports.began()
	var due []*exchanged
	told := false
	defer func() {
		failure := recover() // of a hook of the program, as a tracer of pgx: it must not end the process
		if failure == nil {
			return
		}
		p.failed(ctx, due, told, fmt.Errorf("a hook panicked: %v", failure), began)
	}()
	due = p.collect(l.config.estimate())
	if len(due) == 0 {
		return
	}
	timeout := exchangeTimeout
	if l.config.Timeout > 0 {
		timeout = min(timeout, l.config.Timeout)
	}
	bounded, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	told = true
	if err := l.session.ReportPrices(bounded, reportsOf(due)); err != nil {
		p.failed(ctx, due, !changedNothing(err) && !wasNotSent(err), err, began)
		return
	}
	due = p.leaveHeld(ctx, due, began)
	p.learn(ctx, due)
	over := due[:0:0]
	for _, e := range due {
		if e.isOver() {
			over = append(over, e)
		}
	}
	if len(over) == 0 {
		return
	}
	if err := l.session.TurnPrices(bounded, reportsOf(over)); err != nil { // what was told is told
		p.failed(ctx, over, true, err, began)
		return
	}
	for _, e := range over {
		e.turned = e.report.HasUpstream
	}
	p.learn(ctx, slices.DeleteFunc(over, func(e *exchanged) bool { return !e.turned }))
}

// collect returns the keys for which it is time, with what was reported of them, in the order of locking.
func (p *prices) collect(now int64) (due []*exchanged) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	for _, u := range p.of {
		if len(due) == maxReports {
			break
		}
		if !u.used.Load() {
			continue
		}
		u.mu.Lock()
		if u.isDue(now) {
			due = append(due, u.take(now))
		}
		u.mu.Unlock()
	}
	slices.SortFunc(due, func(a, b *exchanged) int { return a.key.Compare(b.key) })
	return due
}

// take takes what was reported of the key since the latest exchange. u.mu is held.
func (u *upstream) take(now int64) *exchanged {
	e := &exchanged{upstream: u, adapting: u.policy.adapting(u.terms), pausedTo: u.retryAt}
	e.report = store.Report{Key: u.key, Outcomes: u.outcomes, Accepted: u.accepted, Throttled: u.throttled, FirstShare: 1}
	if u.retryAt != 0 && u.retryAt > now {
		e.report.RetryAfter = time.Duration(u.retryAt-now) * time.Microsecond
	}
	u.outcomes, u.accepted, u.throttled, u.retryAt = 0, 0, 0, 0
	u.askedAt.Store(now)
	u.used.Store(false)
	return e
}

// reportsOf returns the reports of the keys.
func reportsOf(due []*exchanged) []*store.Report {
	reports := make([]*store.Report, len(due))
	for i, e := range due {
		reports[i] = &e.report
	}
	return reports
}

// failed tells the observer that the exchange has failed, and keeps what was not told for the next.
func (p *prices) failed(ctx context.Context, due []*exchanged, told bool, err error, began time.Time) {
	name := ""
	for _, e := range due {
		if name = due[0].key.Name; told {
			break
		}
		e.mu.Lock()
		e.outcomes += e.report.Outcomes
		e.accepted += e.report.Accepted
		e.throttled += e.report.Throttled
		e.retryAt = max(e.retryAt, e.pausedTo)
		e.mu.Unlock()
	}
	err = during(fmt.Sprintf("report %q", name), p.limiter.explained(ctx, err, false))
	p.limiter.reports.failed(ctx, Failed{Verb: "report", Limit: name, Err: err}, began)
}

// leaveHeld keeps the outcomes of the keys whose rows another transaction has locked for the next exchange, notifies the observer,
// and returns the other keys.
func (p *prices) leaveHeld(ctx context.Context, due []*exchanged, began time.Time) (free []*exchanged) {
	var held []*exchanged
	for _, e := range due {
		if e.report.Held != nil {
			held = append(held, e)
		} else {
			free = append(free, e)
		}
	}
	if len(held) > 0 {
		p.failed(ctx, held, false, held[0].report.Held, began)
	}
	return free
}

// wasNotSent reports whether there was no connection to send a statement on: none could be made, or none of the pool came
// free in time. pgx gives a time that ends during a statement a type of its own.
func wasNotSent(err error) bool {
	var connectErr *pgconn.ConnectError
	return errors.As(err, &connectErr) || errors.Is(err, context.DeadlineExceeded) && !pgconn.Timeout(err)
}

// isOver reports whether the epoch of the key is over, and sets what follows it. One that a clock has begun that was wrong
// begins again; a statement that has waited for the row is only a little older than the epoch.
func (e *exchanged) isOver() bool {
	r := &e.report
	if !r.HasUpstream || r.Outcomes == 0 { // only who reports has a say
		return false
	}
	known := &r.Upstream
	r.NextShare, r.Cut = known.Share, known.Cut
	if known.BegunUs-known.NowUs > bucket.ClockTolerance.Microseconds() {
		return true
	}
	if !e.adapting.IsOver(known.Measured(), known.Cut) {
		return false
	}
	r.NextShare, r.Cut = e.adapting.Next(known.Share, known.Measured())
	return true
}

// learn takes over what is known of the keys, and tells the observer of prices that have changed.
func (p *prices) learn(ctx context.Context, of []*exchanged) {
	now := p.limiter.config.estimate()
	for _, e := range of {
		share, until := 1.0, int64(0)
		if r := &e.report; r.HasUpstream {
			share = r.Upstream.Share
			if left := r.Upstream.PausedUntilUs - r.Upstream.NowUs; left > 0 && r.Upstream.PausedUntilUs != 0 {
				until = now + left
			}
		}
		e.mu.Lock()
		e.pausedUntil.Store(max(until, e.retryAt))
		e.mu.Unlock()
		before := math.Float64frombits(e.share.Swap(math.Float64bits(share)))
		was, is := 1/e.adapting.Clamp(before), 1/e.adapting.Clamp(share)
		if was != is {
			p.limiter.reports.tell(ctx, PriceChanged{Limit: e.key.Name, Before: was, Price: is, Applied: e.adapting.Applied, Decided: e.turned})
		}
	}
}
