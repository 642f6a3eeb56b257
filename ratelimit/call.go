package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/batch"
	"github.com/pgratelimit/pgratelimit/internal/gate"
	"github.com/pgratelimit/pgratelimit/internal/reserved"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// The verbs that decide, as observers are told them.
const (
	verbTake    = "take"
	verbCheck   = "check"
	verbReserve = "reserve"
)

// call is one call of a verb over requests.
type call struct {
	store.Call
	plan plan

	requests []Request // of a call that is made again when the database's clock says that a rule is in another mode

	change  func(context.Context, *store.Session) error // what the verb changes, whatever the buckets hold; nil: it decides
	untold  bool                                        // whether the observer is not told of the decision
	quiet   bool                                        // whether nobody is told of a refusal, as the verb goes on
	recalls bool                                        // whether the call may be answered from memory

	from   source
	states []State // of its buckets, when it is not from the database
	at     int64   // the instant of the decision then

	began time.Time // when an observer wants to know how long the call takes
}

// Take takes what the requests cost from all of their limits, or from none of them.
//
// The decision is Allowed, or it says how long to wait. An error is a failure, never a refusal: treat
// the request as refused. Requests that could never be allowed are errors: see ErrInvalidCost,
// ErrInvalidKey, ErrCostExceedsCapacity and ErrInvalidRequest, all found before any SQL is sent, so that
// the transaction stays usable.
//
// Outside a transaction the call is one round trip and its own commit, for which it has the time of Config.Timeout.
// Conflicts are retried; a connection that fails during the call, or a time that ends, leaves it open whether the tokens
// were taken, and that is an error too.
// A call whose costs are all 0 takes and writes nothing, as Check.
func (l *Limiter) Take(ctx context.Context, requests ...Request) (Decision, error) {
	if len(requests) == 1 && l != nil && l.pool != nil && (l.cache != nil || !l.ahead.IsEmpty()) {
		if d, known := recallOne(ctx, l, &requests[0]); known {
			return d, nil
		}
	}
	c, err := l.begin(ctx, verbTake, requests)
	if err != nil {
		return Decision{}, err
	}
	c.Look = c.plan.costless // there is nothing to write
	c.recalls = !c.Look && l.pool != nil && (l.cache != nil || c.Asks[0].Terms.Prefetch != 0) && c.plan.isPlain()
	return l.doOnce(ctx, c)
}

// TakeUpTo takes as much as there is, up to n units: of several limits the most that all of them have. The cost of each
// request is the price of one unit. Only whole units are taken, and what is left of a fraction stays in the bucket, so that
// whoever asks again and again comes to the rate of the limit.
//
//	n, d, err := limiter.TakeUpTo(ctx, len(queue), Mails.For(sender), Bytes.For(sender).Cost(size))
//
// It returns how many it took. When that is 0 the decision is a refusal, and RetryAfter is the wait until one unit is there;
// else the decision is Allowed, and the Cost of each State is what was taken from it: its price times the units. A limit that
// is in shadow makes them no fewer; where it has too little for all of them, nothing is taken from it.
//
// The buckets are locked, decided on, and saved: two round trips in a transaction, where Take has one, and outside of one a
// transaction of its own. It is as exact as Take, and the errors are those of Take. It returns
// ErrInvalidRequest, before any SQL, when n is below 1, and for a [Concurrency]; and ErrInvalidCost for units that cost nothing.
func (l *Limiter) TakeUpTo(ctx context.Context, n int, requests ...Request) (taken int, d Decision, err error) {
	c, err := l.begin(ctx, verbTake, requests)
	if err != nil {
		return 0, Decision{}, err
	}
	if n < 1 {
		return 0, Decision{}, fmt.Errorf("%w: TakeUpTo %d units; ask for 1 or more", ErrInvalidRequest, n)
	}
	if isCostless(requests) {
		return 0, Decision{}, fmt.Errorf("%w: TakeUpTo of units that cost nothing; the cost of a request is the price of one unit", ErrInvalidCost)
	}
	c.UpTo = n
	if d, err = l.do(ctx, c); err != nil || !d.Allowed {
		return 0, d, err
	}
	return c.Taken, d, nil
}

// isCostless reports whether none of the requests costs anything.
func isCostless(requests []Request) bool {
	for i := range requests {
		if requests[i].cost > 0 {
			return false
		}
	}
	return true
}

// Check returns the decision Take would return, and takes nothing. Somebody else may take the tokens
// before you do, so do not check first and take later: take, and give up the work when refused.
//
// It reads with a SELECT. In a SERIALIZABLE transaction that read takes part in conflict detection as
// any read of yours, which Take avoids.
func (l *Limiter) Check(ctx context.Context, requests ...Request) (Decision, error) {
	c, err := l.begin(ctx, verbCheck, requests)
	if err != nil {
		return Decision{}, err
	}
	c.Look = true
	return l.doOnce(ctx, c)
}

// Value returns what the bucket of request holds, to show it or to project it. The request's cost does
// not matter. It reads as Check does.
func (l *Limiter) Value(ctx context.Context, request Request) (Value, error) {
	c, err := l.begin(ctx, "value", []Request{request.Cost(0)})
	if err != nil {
		return Value{}, err
	}
	c.Look, c.untold = true, true
	d, err := l.doOnce(ctx, c)
	if err != nil {
		return Value{}, err
	}
	return d.States[0].Value, nil
}

// Reset fills the buckets of the requests to their capacity, as on a successful login. Debts are
// forgotten with the rest, so reserved work that has not run yet comes on top. A fixed window stays where it
// is. In a transaction the reset is undone with it.
func (l *Limiter) Reset(ctx context.Context, requests ...Request) error {
	c, err := l.begin(ctx, "reset", costless(requests))
	if err != nil {
		return err
	}
	c.change = func(ctx context.Context, s *store.Session) error { return s.Fill(ctx, c.Asks) }
	_, err = l.do(ctx, c)
	return err
}

// costless returns the requests without their costs.
func costless(requests []Request) []Request {
	free := make([]Request, len(requests))
	for i, r := range requests {
		free[i] = r.Cost(0)
	}
	return free
}

// begin does what every call does before SQL: a statement that fails takes the caller's transaction with it.
func (l *Limiter) begin(ctx context.Context, verb string, requests []Request) (*call, error) {
	if err := l.ready(ctx, verb); err != nil {
		return nil, err
	}
	c := newCall()
	c.Verb = verb
	if err := c.plan.arrange(ctx, l, verb, requests); err != nil {
		c.touchPrices(ctx, l)
		return nil, err
	}
	if c.plan.doubtful {
		now, err := askTime(ctx, l, &c.plan, verb)
		if err != nil {
			return nil, c.failed(ctx, l, err)
		}
		c.plan = plan{now: now}
		if err := c.plan.arrange(ctx, l, verb, requests); err != nil {
			return nil, err
		}
	}
	if c.plan.moded {
		c.requests = slices.Clone(requests)
	}
	c.Asks = c.plan.asks
	return c, nil
}

// spareCalls are calls that can be used again, each with nothing in it: a call is a thousand bytes, and what callers who share
// batches allocate is most of what they cost.
var spareCalls sync.Pool //nolint:gochecknoglobals // of *call: a pool, which nothing depends on

func newCall() *call {
	if c, ok := spareCalls.Get().(*call); ok {
		return c
	}
	return &call{}
}

// Free is for package batch.
func (c *call) Free() {
	*c = call{}
	spareCalls.Put(c)
}

// doOnce is do for a call that nobody looks at afterwards. It is used again when it was answered in a batch, for one bucket,
// and no other call that was made for it shares its memory, as those under rules may.
func (l *Limiter) doOnce(ctx context.Context, c *call) (Decision, error) {
	if l.pool != nil && len(c.Asks) == 1 && !c.plan.ruled {
		c.Owner = c
	}
	d, err := l.do(ctx, c)
	switch {
	case err != nil:
	case c.from != fromDatabase: // no batch has seen it
		c.Free()
	case c.Owner != nil:
		c.Done()
	}
	return d, err
}

// ready returns an error when the Limiter or the context cannot be used.
func (l *Limiter) ready(ctx context.Context, verb string) error {
	switch {
	case l == nil || l.store == nil:
		return fmt.Errorf("%w: %s on a Limiter that New did not return", ErrInvalidConfig, verb)
	case l.misuse != "":
		return fmt.Errorf("%w: %s %s", ErrInvalidConfig, verb, l.misuse)
	case ctx.Err() != nil:
		return fmt.Errorf("ratelimit: %s: %w", verb, ctx.Err())
	}
	return nil
}

// do decides on c, or changes what c changes, and tells who wants to know.
func (l *Limiter) do(ctx context.Context, c *call) (d Decision, err error) {
	if l.reports.observer != nil {
		c.began = time.Now()
	}
	c.touchPrices(ctx, l)
	if c.recalls {
		c.states, c.at, c.from = recall(l, c.Asks, c.plan.of)
	}
	if c.from == fromDatabase {
		err = c.runInMode(ctx, l)
	}
	if err == nil && c.plan.ruled && c.change == nil {
		err = c.leaveShadowsOut(func(again *call) error { return again.runInMode(ctx, l) })
	}
	if err != nil {
		return Decision{}, c.failed(ctx, l, err)
	}
	switch {
	case c.from != fromDatabase:
		d = c.plan.decision(c.states, c.at)
	case c.change == nil:
		d = c.plan.decide(c.Answers)
	}
	l.reports.done(ctx, c, &d)
	return d, nil
}

// runInMode runs the call, and again if a rule is in another mode by the database's clock than by the clock of this process.
func (c *call) runInMode(ctx context.Context, l *Limiter) error {
	err := c.run(ctx, l)
	if errors.Is(err, store.ErrOtherMode) { // nothing was taken
		var arranged plan
		if arranged, err = c.arrangeAgain(ctx, l); err == nil {
			err = c.retryWith(arranged, func(again *call) error { return again.run(ctx, l) })
		}
	}
	if err != nil { // a batch that its caller has left goes on with the call
		return err
	}
	c.plan.taken = c.Taken
	return nil
}

// retryWith runs the call again by another plan, and takes over its outcome. A batch may still look at the first attempt.
func (c *call) retryWith(arranged plan, run func(again *call) error) error {
	again := &call{plan: arranged, change: c.change, began: c.began}
	again.Question, again.Asks = c.Question, arranged.asks
	again.Look = c.Verb == verbCheck || arranged.costless && !arranged.reserves && c.UpTo == 0
	if before, reserves := c.Reserve.(*reserved.Keeping); reserves {
		keeping := *before
		keeping.NotBefore, keeping.Plans = arranged.notBefore, arranged.plans()
		again.Reserve = &keeping
	}
	err := run(again)
	c.plan, c.Question, c.Outcome = again.plan, again.Question, again.Outcome
	return err
}

// run changes what c changes, or decides on c, when the gate lets it pass. In a transaction the store decides.
func (c *call) run(ctx context.Context, l *Limiter) error {
	if len(c.Asks) == 0 { // the answers are known
		if c.plan.notBefore == 0 { // else one of them is paused
			c.Taken = c.UpTo
		}
		return nil
	}
	if (l.isConnection || !l.gate.IsOpen(&l.session, c.plan.keyed)) && !c.isRejected(l) {
		bounded, cancel := l.bounded(ctx) // what is looked at and the call together
		defer cancel()
		ctx = bounded
		if err := l.pass(ctx, c.Verb, c.plan.keyed, c.Look); err != nil {
			return err
		}
	}
	switch {
	case c.change != nil:
		if c.Verb != "refund" { // of what was given out
			l.ahead.GiveUp(ctx, c.Asks, l.pool == nil)
		}
		ctx, cancel := l.bounded(ctx)
		defer cancel()
		return l.session.Change(ctx, c.Verb, c.change)
	case l.pool == nil:
		return l.session.Decide(ctx, &c.Call)
	case c.recalls || l.cache != nil:
		return c.remember(ctx, l)
	}
	return l.batcher.Do(ctx, c.Queueable())
}

// isRejected reports whether the batcher rejects the call, so that nothing needs to be sent for it.
func (c *call) isRejected(l *Limiter) bool {
	return l.pool != nil && c.change == nil && l.batcher.IsClosed()
}

// failed returns err with what was being done, and tells the observer. It names the limit, and never a key.
func (c *call) failed(ctx context.Context, l *Limiter, err error) error {
	if l.pool != nil && !changedNothing(err) { // who knows what it took
		l.reports.invalidate(c.Asks)
	}
	name := c.plan.firstLimit()
	err = during(fmt.Sprintf("%s %q", c.Verb, name), l.explained(ctx, err))
	l.reports.failed(ctx, Failed{Verb: c.Verb, Limit: name, Err: err}, c.began)
	return err
}

// bounded returns ctx with the time that Config.Timeout leaves a call outside a transaction.
func (l *Limiter) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	return batch.Bounded(ctx, l.config.Timeout)
}

// pass returns an error when a call must not be sent: a single connection is in a transaction, the keys are stored under another secret,
// or statements would get lost on the way to the server. A call that is not keyed names keys as they are stored, or none.
func (l *Limiter) pass(ctx context.Context, verb string, keyed, looks bool) error {
	if l.isConnection {
		if err := notInTx(l.pool); err != nil {
			return err
		}
	}
	if l.gate.IsOpen(&l.session, keyed) {
		return nil
	}
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	return l.gate.Pass(ctx, &l.session, gate.Call{Verb: verb, Keyed: keyed, Looks: looks})
}

// touchPrices touches the upstreams of a call. By then the call has read all its prices, so that no exchange changes some of them:
// Wait makes two plans before it runs the first.
func (c *call) touchPrices(ctx context.Context, l *Limiter) {
	for _, u := range c.plan.upstreams {
		l.prices.Touch(ctx, u, c.plan.now, false)
	}
}
