package ratelimit

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/internal/engine/batch"
	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/preflight"
	"github.com/pgratelimit/pgratelimit/internal/engine/store"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// The verbs that decide, as events name them.
const (
	verbTake    = "take"
	verbCheck   = "check"
	verbReserve = "reserve"
)

type call struct {
	store.Call
	plan plan

	change  func(context.Context, *store.Session) error // the change of a verb that does not decide; nil: the verb decides
	untold  bool                                        // whether the decision is not reported to the Observer
	recalls bool                                        // whether the refusal cache may refuse the call

	states []State // the states of its buckets, if the refusal cache has refused it
	at     int64   // the time of that decision

	began time.Time // set if an Observer needs the duration
}

// Take takes the costs of the requests from all of their limits, or from none of them.
//
// Check the decision's Allowed; after a refusal, RetryAfter is the time to wait. An error is a failure, never a
// refusal: treat the request as refused. Requests that could never be allowed are errors (ErrInvalidCost,
// ErrInvalidKey, ErrCostExceedsCapacity and ErrInvalidRequest), which Take returns before any SQL, so your transaction
// stays usable.
//
// Outside a transaction the call is one round trip with its own commit, within Config.Timeout, and it retries
// conflicts. If the connection fails during the call, or its time ends, it's unknown whether the tokens were taken. If
// all costs are 0, Take writes nothing, like Check.
func (l *Limiter) Take(ctx context.Context, requests ...Request) (Decision, error) {
	if len(requests) == 1 && l != nil && l.pool != nil && l.cache != nil {
		if d, refused := recallOne(ctx, l, &requests[0]); refused {
			return d, nil
		}
	}
	c, err := l.begin(ctx, verbTake, requests)
	if err != nil {
		return Decision{}, err
	}
	c.Look = c.plan.costless // nothing to write
	c.recalls = l.cache != nil && l.pool != nil && !c.Look && c.plan.isPlain()
	return doOnce(ctx, l, c)
}

// Check returns the decision that Take would return, and takes nothing. Don't check first and take later, because
// others can take the tokens meanwhile: take, and give up the work after a refusal.
//
// It reads with a SELECT, so in a SERIALIZABLE transaction it can cause serialization failures, like your own reads.
// Take avoids that.
func (l *Limiter) Check(ctx context.Context, requests ...Request) (Decision, error) {
	c, err := l.begin(ctx, verbCheck, requests)
	if err != nil {
		return Decision{}, err
	}
	c.Look = true
	return doOnce(ctx, l, c)
}

// Value returns the bucket's content, to show it or to predict later ones. The request's cost doesn't matter. It reads
// as Check does.
func (l *Limiter) Value(ctx context.Context, request Request) (Value, error) {
	c, err := l.begin(ctx, "value", []Request{request.Cost(0)})
	if err != nil {
		return Value{}, err
	}
	c.Look, c.untold = true, true
	d, err := doOnce(ctx, l, c)
	if err != nil {
		return Value{}, err
	}
	return d.States[0].Value, nil
}

// Reset fills the requests' buckets, for example after a successful login. Debt is forgotten, too, so reserved work
// that hasn't run yet is admitted on top. A fixed window's boundaries don't move. A rollback undoes it.
func (l *Limiter) Reset(ctx context.Context, requests ...Request) error {
	c, err := l.begin(ctx, "reset", costless(requests))
	if err != nil {
		return err
	}
	rows, _ := c.plan.rows(true)
	c.change = func(ctx context.Context, s *store.Session) error {
		return s.Fill(ctx, rows)
	}
	_, err = l.do(ctx, c)
	return err
}

func costless(requests []Request) []Request {
	free := make([]Request, len(requests))
	for i, r := range requests {
		free[i] = r.Cost(0)
	}
	return free
}

// begin checks and arranges the requests of a call before any SQL, because a failed statement would abort the caller's
// transaction.
func (l *Limiter) begin(ctx context.Context, verb string, requests []Request) (*call, error) {
	if err := l.ready(ctx, verb, requests...); err != nil {
		return nil, err
	}
	c := newCall()
	c.Verb = verb
	if err := c.plan.arrange(ctx, l, verb, requests); err != nil {
		return nil, err
	}
	c.Asks = c.plan.asks
	return c, nil
}

// spareCalls are empty calls to use again. A call is a thousand bytes, and allocations are most of the cost of a call
// in a batch.
var spareCalls sync.Pool //nolint:gochecknoglobals // a pool of *call without state

func newCall() *call {
	if c, ok := spareCalls.Get().(*call); ok {
		return c
	}
	return &call{}
}

// Free empties c and returns it to the pool. Package batch calls it when no batch uses c any more.
func (c *call) Free() {
	*c = call{}
	spareCalls.Put(c)
}

// doOnce runs c and returns it to the pool. The caller must not use c afterwards. It returns only a call that was
// answered from memory, or in a batch for one bucket without rules, because other calls may share its memory.
func doOnce(ctx context.Context, l *Limiter, c *call) (Decision, error) {
	if l.pool != nil && len(c.Asks) == 1 && !c.plan.ruled {
		c.Owner = c
	}
	d, err := l.do(ctx, c)
	switch {
	case err != nil:
	case c.isRecalled(): // no batch uses it
		c.Free()
	case c.Owner != nil:
		c.Done()
	}
	return d, err
}

// ready returns an error if the Limiter or the context cannot be used for a call of verb, with requests if it has any.
func (l *Limiter) ready(ctx context.Context, verb string, requests ...Request) error {
	switch {
	case l == nil || l.store == nil:
		return fmt.Errorf("%w: %s on a Limiter that New did not return", ErrInvalidConfig, verb)
	case l.misuse != "":
		return fmt.Errorf("%w: %s %s", ErrInvalidConfig, verb, l.misuse)
	case ctx == nil:
		return fmt.Errorf("%w: %w", ErrInvalidRequest, arg.CheckContext(ctx, verb))
	case ctx.Err() != nil && len(requests) > 0:
		return fmt.Errorf("ratelimit: %s %q: the context ended before the call: %w", verb, requests[0].limit.Name(),
			ctx.Err())
	case ctx.Err() != nil:
		return fmt.Errorf("ratelimit: %s: the context ended before the call: %w", verb, ctx.Err())
	}
	return nil
}

// detached returns a context that does not end, for ready: nil for nil.
func detached(ctx context.Context) context.Context {
	if ctx == nil {
		return nil
	}
	return context.WithoutCancel(ctx)
}

// do runs c, reports it, and returns its decision.
func (l *Limiter) do(ctx context.Context, c *call) (d Decision, err error) {
	if l.reports.observer != nil {
		c.began = time.Now()
	}
	if c.recalls {
		c.states, c.at = recall(l, c.Asks, c.plan.of)
	}
	if !c.isRecalled() {
		err = c.run(ctx, l)
	}
	if err == nil && c.plan.ruled && c.change == nil {
		err = c.leaveShadowsOut(func(again *call) error { return again.run(ctx, l) })
	}
	if err != nil {
		return Decision{}, c.failed(ctx, l, err)
	}
	switch {
	case c.isRecalled():
		d = c.plan.decision(c.states, c.at)
	case c.change == nil:
		if c.Verb == verbAcquire && !c.Look {
			bucket.HideOthers(c.Asks, c.Answers)
		}
		d = c.plan.decide(c.Answers)
	}
	l.reports.done(ctx, c, &d)
	return d, nil
}

// run executes c if the gate lets it pass: in a transaction directly, otherwise through the refusal cache and the
// batcher.
func (c *call) run(ctx context.Context, l *Limiter) error {
	if len(c.Asks) == 0 { // the answers are known
		return nil
	}
	if !l.gate.IsOpen(&l.session, c.plan.keyed) && !c.isRejected(l) {
		bounded, cancel := l.config.bounded(ctx) // one time limit for the check and the call
		defer cancel()
		ctx = bounded
		if err := l.pass(ctx, c.Verb, c.plan.keyed, c.Look); err != nil {
			return err
		}
	}
	if c.change != nil {
		ctx, cancel := l.config.bounded(ctx)
		defer cancel()
		return l.session.Change(ctx, c.Verb, c.change)
	}
	return c.askNoting(ctx, l)
}

// ask has the database decide on c: in the transaction, or in a batch if possible.
func (c *call) ask(ctx context.Context, l *Limiter) error {
	if !c.plan.sharded {
		return send(ctx, l, &c.Call)
	}
	ctx, cancel := l.config.bounded(ctx) // one time limit for all parts of the call
	defer cancel()
	c.plan.pickRows(l)
	return c.askRows(func(part *store.Call) error { return send(ctx, l, part) })
}

// send sends a call: in the transaction, or in a batch if possible.
func send(ctx context.Context, l *Limiter, c *store.Call) error {
	switch {
	case l.pool == nil:
		return l.session.Decide(ctx, c)
	case c.Verb == verbAcquire && !c.Look && !l.session.IsInMemory():
		return sendLease(ctx, l, c)
	}
	return l.batcher.Do(ctx, c.Queueable())
}

// isRecalled reports whether the refusal cache has refused the call.
func (c *call) isRecalled() bool { return c.states != nil }

// isRejected reports whether the batcher rejects the call, so that the gate needs to send nothing for it.
func (c *call) isRejected(l *Limiter) bool {
	return l.pool != nil && c.change == nil && l.batcher.IsClosed()
}

// failed reports a failed call to the Observer, and returns err with the verb and the limit. It never names a key.
func (c *call) failed(ctx context.Context, l *Limiter, err error) error {
	if l.pool != nil && !changedNothing(err) { // it may have taken tokens
		l.reports.invalidate(c.Asks)
	}
	name := c.plan.firstLimit()
	err = explained(ctx, l, fmt.Sprintf("%s %q", c.Verb, name), err)
	l.reports.failed(ctx, event.Failed{Verb: c.Verb, Limit: name, Err: err}, c.began)
	return err
}

// bounded returns ctx limited by Config.Timeout, for a call outside a transaction.
func (c *Config) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	return batch.Bounded(ctx, c.Timeout)
}

// pass returns an error if a call must not be sent: the keys are stored under another secret, or the connection path
// loses prepared statements. keyed is whether the call names keys that are not in their stored form.
func (l *Limiter) pass(ctx context.Context, verb string, keyed, looks bool) error {
	if l.gate.IsOpen(&l.session, keyed) {
		return nil
	}
	ctx, cancel := l.config.bounded(ctx)
	defer cancel()
	return l.gate.Pass(ctx, &l.session, preflight.Call{Verb: verb, Keyed: keyed, Looks: looks})
}

// Require takes the costs of the requests from all of their limits and returns nil, or takes from none of them and
// returns an error. Begin with it, because a program that ignores Take's Allowed admits every request without notice.
//
//	if err := limiter.WithTx(tx).Require(ctx, SendMessage.For(userID)); err != nil {
//		return err // refused or failed: the transaction rolls back, and nothing is taken
//	}
//
// A refusal is a *[LimitedError], which [errors.As] finds; its Decision has the limits that refused, and the time to
// wait. Every other error is a failure, as from Take. [ErrLimited] and [IsUndecided] tell the two apart.
//
// A limit in [Shadow] mode refuses no request, and gives no tokens when it would have refused, which only the Observer
// learns. A failure is still an error.
func (l *Limiter) Require(ctx context.Context, requests ...Request) error {
	d, err := l.Take(ctx, requests...)
	if err != nil {
		return err
	}
	return d.Err()
}

// recallOne is recall for a Take of one request. It makes no call and no plan, which would double its time.
func recallOne(ctx context.Context, l *Limiter, r *Request) (d Decision, refused bool) {
	if ctx.Err() != nil {
		return d, false
	}
	key, err := storedKey(l.config.HashKey, r)
	if err != nil {
		return d, false
	}
	began, now := l.reports.began(), int64(0)
	s, of := subjectOf(ctx, l, verbTake, r, key, &now)
	if s.mode != On || s.pausedUntil > now || !(r.cost > 0) || checkCost(&of, r.cost, of.terms.Capacity) != nil {
		return d, false
	}
	asks := [1]bucket.Ask{{Key: bucket.Key{Name: of.name, Key: key}, Terms: of.terms, Policy: s.limit, Cost: r.cost}}
	states, at := recall(l, asks[:], []subject{s})
	if states == nil {
		return d, false
	}
	d = Decision{Allowed: true, At: time.UnixMicro(at), States: states}
	d.add(&states[0], true)
	if l.reports.refused != nil {
		l.reports.refusal(ctx, &states[0], Refusal{Key: key, Cost: r.cost, At: d.At, Cached: true})
	}
	l.reports.decided(ctx, Decided{Verb: verbTake, Decision: d, Cached: true}, began)
	return d, true
}

// recall refuses a Take with a refusal in the refusal cache. It returns the states of the buckets, or nil if it knows
// none, and the time of the decision. It neither waits nor sends anything.
func recall(l *Limiter, asks []bucket.Ask, of []subject) (states []State, at int64) {
	if l.batcher.IsClosed() {
		return nil, 0
	}
	var room [2]bucket.Outcome
	outcomes, refused := l.cache.Refuse(asks, room[:0])
	if !refused {
		return nil, 0
	}
	states, at = make([]State, len(outcomes)), outcomes[0].Now
	for i := range outcomes {
		states[i].set(of[i].holding(&outcomes[i].Terms), &asks[i], &outcomes[i])
		of[i].tokens = outcomes[i].Tokens * float64(of[i].shards)
		of[i].tell(&states[i], &outcomes[i].Terms)
		at = max(at, outcomes[i].Now)
	}
	return states, at
}

// askNoting is ask. Outside transactions it stores a refusal in the refusal cache, unless the buckets
// can gain tokens before their waits end.
func (c *call) askNoting(ctx context.Context, l *Limiter) error {
	if l.pool == nil || l.cache == nil || c.Look || c.Reserve != nil || !c.plan.isPlain() || bucket.AnyHolds(c.Asks) {
		return c.ask(ctx, l)
	}
	var room [1]uint32 // most calls have one bucket
	sent := l.cache.Send(c.Asks, room[:0])
	err := c.ask(ctx, l)
	if err == nil && !bucket.AllAllowed(c.Answers) {
		for i := range c.Asks {
			c.Asks[i].Policy = c.plan.of[i].holding(&c.Asks[i].Terms)
		}
		l.cache.Keep(sent, c.Asks, c.Answers)
	}
	return err
}
