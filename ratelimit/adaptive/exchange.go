package adaptive

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

const (
	// exchangeTimeout bounds an exchange. No call waits for it.
	exchangeTimeout = 5 * time.Second
	// maxReports bounds the keys of an exchange, whose rows are locked meanwhile.
	maxReports = 500
)

// report has the reports of a process about a key. One that says nothing only asks for the share.
type report struct {
	tally
	retryAfter time.Duration
}

func (r *report) saysNothing() bool { return r.Outcomes == 0 && r.retryAfter == 0 }

// exchanged is a key in an exchange.
type exchanged struct {
	*upstream
	report

	adapting adapting
	pausedTo int64 // the end of the pause that the upstream asked for since the last exchange; 0: none

	known   known // what came of it
	isKnown bool  // whether the table has a row that this role may see
	written bool  // whether the report was written
	turned  bool  // whether this process has ended the epoch
}

// write adds the report to the row of the key, and ends the epoch if it is over.
func (e *exchanged) write(k known, now int64) known {
	k.add(&e.report, now)
	e.turned = k.turn(&e.adapting, now)
	e.known, e.isKnown, e.written = k, true, true
	return k
}

// begin begins an exchange, unless one is under way.
func (p *Policies) begin() {
	p.state.Lock()
	if p.underWay != nil || p.closed {
		p.state.Unlock()
		return
	}
	done := make(chan struct{})
	p.underWay = done
	p.state.Unlock()
	if p.config.Local {
		p.run(done)
		return
	}
	go p.run(done)
}

// run runs an exchange.
func (p *Policies) run(done chan struct{}) {
	p.exchange()
	p.state.Lock()
	p.underWay = nil
	p.state.Unlock()
	close(done)
}

// exchange writes the reports of the due keys to the table, and reads their shares.
func (p *Policies) exchange() {
	began, now := time.Now(), p.now()
	var due []*exchanged
	defer func() {
		if failure := recover(); failure != nil { // of a hook of the program, as a tracer of pgx: it must not end the process
			p.failed(due, true, fmt.Errorf("a hook panicked: %v", failure), began)
		}
	}()
	due = p.collect(now)
	if len(due) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), exchangeTimeout)
	defer cancel()
	now, unsure, err := p.table.exchange(ctx, due, p.forgets(now))
	if err != nil {
		p.failed(due, unsure, err, began)
		return
	}
	p.learn(due, now)
}

// forgetEvery is how often a process deletes the rows of keys that nobody has reported about for keepRows.
const (
	forgetEvery = 24 * time.Hour
	keepRows    = 7 * 24 * time.Hour
)

// forgets reports whether the exchange at now forgets old rows.
func (p *Policies) forgets(now int64) bool {
	p.state.Lock()
	defer p.state.Unlock()
	if now < p.forgetAt {
		return false
	}
	p.forgetAt = now + forgetEvery.Microseconds()
	return true
}

// collect returns the due keys with their reports, in the order in which rows are inserted.
func (p *Policies) collect(now int64) (due []*exchanged) {
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
	slices.SortFunc(due, func(a, b *exchanged) int { return a.compare(b.bucket) })
	return due
}

// take takes the reports about the key since the latest exchange. u.mu is held.
func (u *upstream) take(now int64) *exchanged {
	e := &exchanged{
		upstream: u, pausedTo: u.retryAt, report: report{tally: u.counted},
		adapting: u.made.Load().adapting(u.of, now),
	}
	if u.retryAt > now {
		e.retryAfter = time.Duration(u.retryAt-now) * time.Microsecond
	}
	u.counted, u.retryAt = tally{}, 0
	u.askedAt.Store(now)
	u.used.Store(false)
	return e
}

// giveBack keeps an unwritten report for the next exchange.
func (e *exchanged) giveBack() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.counted.add(e.tally)
	e.retryAt = max(e.retryAt, e.pausedTo)
}

// failed tells the observer that the exchange has failed. unsure is whether its reports may have been written.
func (p *Policies) failed(due []*exchanged, unsure bool, err error, began time.Time) {
	name := ""
	for _, e := range due {
		if name = due[0].name; !unsure {
			e.giveBack()
		}
	}
	p.tell(event.Failed{
		Verb: "report", Limit: name, Err: fmt.Errorf("adaptive: report %q: %w", name, err),
		Began: began, Elapsed: time.Since(began),
	})
}

// learn takes over the state of the keys at now on the database's clock, and tells the observer of changed shares. Rows
// that another transaction had locked were only read.
func (p *Policies) learn(due []*exchanged, now int64) {
	behind := p.now() - now
	for _, e := range due {
		if !e.written {
			e.giveBack()
		}
		if !e.isKnown {
			continue
		}
		until := e.known.pausedUntil(now)
		if until != 0 {
			until += behind
		}
		e.mu.Lock()
		e.pausedUntil.Store(max(until, e.retryAt))
		before := e.adapting.clamp(e.upstream.known)
		e.upstream.known = e.known.Share
		e.mu.Unlock()
		share := e.adapting.clamp(e.known.Share)
		e.share.Store(math.Float64bits(rounded(share, e.adapting.floor)))
		if share != before {
			p.tell(event.ShareChanged{
				Limit: e.name, Before: before, Share: share, Applied: e.adapting.applied,
				Decided: e.turned,
			})
		}
	}
}

// tell passes an event to the Observer. Its panic must not end the process.
func (p *Policies) tell(e event.Event) {
	if p.config.Observer == nil {
		return
	}
	defer func() { _ = recover() }()
	p.config.Observer.Observe(context.Background(), e)
}
