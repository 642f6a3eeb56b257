package adaptive

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

const (
	// exchangeTimeout bounds an exchange. No call waits for it.
	exchangeTimeout = 5 * time.Second
	// maxReports bounds the keys of an exchange, each of which is a row lock held for one round trip.
	maxReports = 500
)

// begin begins an exchange, unless one is under way. It goes on beside the call that begins it, with the values of its
// context. A single connection is for one call at a time, and only outside of transactions.
func (p *Prices) begin(ctx context.Context, inTx bool) {
	single := p.options.Busy != nil
	if single && (inTx || p.options.Busy()) {
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

// enter returns a channel that the caller closes at the end of its exchange, and nil if it may not begin one.
func (p *Prices) enter() chan struct{} {
	p.state.Lock()
	defer p.state.Unlock()
	if p.underWay != nil || p.closed {
		return nil
	}
	p.underWay = make(chan struct{})
	return p.underWay
}

// run runs an exchange.
func (p *Prices) run(ctx context.Context, done chan struct{}) {
	defer func() {
		p.state.Lock()
		p.underWay = nil
		p.state.Unlock()
		close(done)
	}()
	p.exchange(ctx)
}

// Close prevents new exchanges, and waits until a running exchange or ctx has ended.
func (p *Prices) Close(ctx context.Context) error {
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
	*Upstream
	report   Report
	adapting Adapting
	pausedTo int64 // the end of the pause that the upstream asked for since the last exchange; 0: none
	turned   bool  // whether this process has ended its epoch
}

// exchange writes the reports of the due keys to the database, and reads their prices.
func (p *Prices) exchange(ctx context.Context) {
	began := time.Now()
	var due []*exchanged
	told := false
	defer func() {
		failure := recover() // of a hook of the program, as a tracer of pgx: it must not end the process
		if failure == nil {
			return
		}
		p.failed(ctx, due, told, fmt.Errorf("a hook panicked: %v", failure), began)
	}()
	due = p.collect(p.owner.Estimate())
	if len(due) == 0 {
		return
	}
	timeout := exchangeTimeout
	if p.options.Timeout > 0 {
		timeout = min(timeout, p.options.Timeout)
	}
	bounded, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	told = true
	err := p.owner.Pass(bounded)
	if err == nil {
		err = exchangeAll(bounded, p.options.Session, reportsOf(due), Upstreams.Report)
	}
	if err != nil {
		p.failed(ctx, due, p.owner.MayBeKept(err), err, began)
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
	if err := exchangeAll(bounded, p.options.Session, reportsOf(over), Upstreams.Turn); err != nil { // the reports are written
		p.failed(ctx, over, true, err, began)
		return
	}
	for _, e := range over {
		e.turned = e.report.IsKnown
	}
	p.learn(ctx, slices.DeleteFunc(over, func(e *exchanged) bool { return !e.turned }))
}

// collect returns the due keys with their reports, in the order of locking.
func (p *Prices) collect(now int64) (due []*exchanged) {
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

// take takes the reports about the key since the latest exchange. u.mu is held.
func (u *Upstream) take(now int64) *exchanged {
	e := &exchanged{Upstream: u, adapting: u.adapting, pausedTo: u.retryAt}
	e.report = Report{Key: u.key, Outcomes: u.outcomes, Accepted: u.accepted, Throttled: u.throttled}
	if u.retryAt != 0 && u.retryAt > now {
		e.report.RetryAfter = time.Duration(u.retryAt-now) * time.Microsecond
	}
	u.outcomes, u.accepted, u.throttled, u.retryAt = 0, 0, 0, 0
	u.askedAt.Store(now)
	u.used.Store(false)
	return e
}

// reportsOf returns the reports of the keys.
func reportsOf(due []*exchanged) []*Report {
	reports := make([]*Report, len(due))
	for i, e := range due {
		reports[i] = &e.report
	}
	return reports
}

// failed tells the observer that the exchange has failed, and keeps the unwritten reports for the next.
func (p *Prices) failed(ctx context.Context, due []*exchanged, told bool, err error, began time.Time) {
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
	p.owner.Failed(ctx, name, err, began)
}

// leaveHeld keeps the outcomes of the keys whose rows another transaction has locked for the next exchange, notifies the observer,
// and returns the other keys.
func (p *Prices) leaveHeld(ctx context.Context, due []*exchanged, began time.Time) (free []*exchanged) {
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

// isOver reports whether the epoch of the key is over, and sets the next share. An epoch that a wrong clock has begun
// begins again; a statement that has waited for the row is only a little older than the epoch.
func (e *exchanged) isOver() bool {
	r := &e.report
	if !r.IsKnown || r.Outcomes == 0 { // only who reports has a say
		return false
	}
	known := &r.Known
	r.NextShare, r.Cut = known.Share, known.Cut
	if known.BegunUs-known.NowUs > bucket.ClockTolerance.Microseconds() {
		return true
	}
	if !e.adapting.IsOver(measured(known), known.Cut) {
		return false
	}
	r.NextShare, r.Cut = e.adapting.Next(known.Share, measured(known))
	return true
}

// learn takes over the state of the keys, and tells the observer of changed prices.
func (p *Prices) learn(ctx context.Context, of []*exchanged) {
	now := p.owner.Estimate()
	for _, e := range of {
		share, until := 1.0, int64(0)
		if r := &e.report; r.IsKnown {
			share = r.Known.Share
			if left := r.Known.PausedUntilUs - r.Known.NowUs; left > 0 && r.Known.PausedUntilUs != 0 {
				until = now + left
			}
		}
		e.mu.Lock()
		e.pausedUntil.Store(max(until, e.retryAt))
		e.mu.Unlock()
		before := math.Float64frombits(e.share.Swap(math.Float64bits(share)))
		was, is := 1/e.adapting.Clamp(before), 1/e.adapting.Clamp(share)
		if was != is {
			p.owner.Changed(ctx, e.key.Name, was, is, e.adapting.Applied, e.turned)
		}
	}
}
