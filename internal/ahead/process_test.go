package ahead

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/batch"
	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// ledger is the row of one bucket, in place of a database.
type ledger struct {
	mu      sync.Mutex
	row     *bucket.State
	asked   []float64 // the cost of each call
	given   []bucket.Ahead
	changed Event // the sum of all events

	clock          func(instant time.Time) int64
	travels, waits func()                                        // while a statement or its answer is on its way, and while it waits for the row
	before         func(ctx context.Context, cost float64) error // before it decides on a call; nil: nothing is
	after          func() error                                  // when the answer has arrived
	observe        func()                                        // at each event, and not under mu
}

func newLedger() *ledger {
	nothing := func() {}
	return &ledger{clock: time.Time.UnixMicro, travels: nothing, waits: nothing, observe: nothing, after: func() error { return nil }}
}

// arrive returns the instant at which a statement arrives. It is decided at that instant, although it may wait for the row.
func (l *ledger) arrive() (now int64) {
	l.travels()
	now = l.clock(time.Now())
	l.waits()
	return now
}

func (l *ledger) Fetch(ctx context.Context, c *store.Call) error {
	a, now := &c.Asks[0], l.arrive()
	l.mu.Lock()
	l.asked = append(l.asked, a.Cost)
	before := l.before
	l.mu.Unlock()
	if before != nil {
		if err := before(ctx, a.Cost); err != nil {
			return err
		}
	}
	l.change(func() {
		r := bucket.Answer{Now: now, State: a.Terms.Full(now)}
		if l.row != nil {
			r.State = *l.row
		}
		r.State, r.Allowed = buckettest.Take(a.Terms, r.State, now, a.Cost, 0)
		l.row = &r.State
		c.Answers = []bucket.Answer{r}
	})
	l.travels()
	return l.after()
}

// GiveBack gives back to the row.
func (l *ledger) GiveBack(_ context.Context, _ bucket.Key, t bucket.Terms, kept bucket.Ahead, _ time.Duration) (given float64, err error) {
	now := l.arrive()
	l.change(func() {
		l.given = append(l.given, kept)
		given = kept.Returnable(&t, l.row.TS, now)
		*l.row = kept.Return(&t, *l.row, now)
	})
	l.travels()
	return given, nil
}

// Tell adds up the events of the prefetch.
func (l *ledger) Tell(e Event) {
	l.observe()
	l.change(func() {
		l.changed.Taken, l.changed.Returned, l.changed.Lost = l.changed.Taken+e.Taken, l.changed.Returned+e.Returned, l.changed.Lost+e.Lost
	})
}

// change changes the ledger, safely beside concurrent calls.
func (l *ledger) change(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f()
}

// held returns the value of the row.
func (l *ledger) held() float64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.row.Value
}

// on returns a process on the ledger.
func (l *ledger) on(options Options) *process {
	options.MaxWaiting = 10_000
	return &process{Keeper: New(l, options), row: l}
}

// limit is a policy of some name, as the limiter knows it.
type limit struct {
	name           string
	rate, capacity float64 // of the policy: the row may hold less
	terms          bucket.Terms
}

// tokenBucket returns a limit of rate tokens each period.
func tokenBucket(name string, rate float64, period time.Duration, capacity float64, prefetch time.Duration) *limit {
	l := &limit{name, rate, capacity, buckettest.TokenBucket(rate, period, capacity)}
	l.terms.Prefetch = prefetch.Microseconds()
	l.terms.Capacity, _ = bucket.RowCapacity(capacity, rate, l.terms.Steps, l.terms.Prefetch)
	return l
}

// fixedWindow returns a limit of rate tokens in each window.
func fixedWindow(name string, rate float64, period time.Duration, capacity float64, start time.Time, prefetch time.Duration) *limit {
	l := &limit{name, rate, capacity, buckettest.FixedWindow(rate, period, capacity, start.UnixMicro())}
	l.terms.Prefetch = prefetch.Microseconds()
	return l
}

// ask returns an ask for tokens of a key.
func (l *limit) ask(key string, cost float64) bucket.Ask {
	return bucket.Ask{Key: bucket.Key{Name: l.name, Key: key}, Terms: l.terms, Policy: l, Cost: cost}
}

// process answers calls as a limiter does: with kept tokens, or else from the row.
type process struct {
	*Keeper
	row Owner
}

// decision is the answer to a call.
type decision struct {
	bucket.Told
	Prefetched bool
}

func (p *process) take(ctx context.Context, a bucket.Ask) (decision, error) {
	content, asks := &bucket.Content{}, []bucket.Ask{a}
	if views, taken := p.Take(asks, nil); taken {
		return decision{views[0].Tell(content), true}, nil
	}
	if !p.Serves(asks) {
		return p.ask(ctx, a)
	}
	var d decision
	v, given, err := p.Do(ctx, asks, func() (answers []bucket.Answer, err error) {
		if d, err = p.ask(ctx, a); err != nil {
			return nil, err
		}
		return []bucket.Answer{{Allowed: d.Allowed, State: d.State, Now: d.Now}}, nil
	})
	if given {
		return decision{v.Tell(content), true}, nil
	}
	return d, err
}

// ask takes from the row.
func (p *process) ask(ctx context.Context, a bucket.Ask) (decision, error) {
	ctx, cancel := batch.Bounded(ctx, p.options.Timeout)
	defer cancel()
	c := &store.Call{Question: store.Question{Asks: []bucket.Ask{a}}}
	if err := p.row.Fetch(ctx, c); err != nil {
		return decision{}, err
	}
	r := c.Answers[0]
	o := a.Tell(&r, 0, &bucket.Content{})
	return decision{Told: bucket.Told{
		Content: &bucket.Content{Terms: a.Terms, State: r.State}, Now: r.Now, Allowed: r.Allowed, Tokens: o.Tokens, RetryAfter: o.RetryAfter, FullAfter: o.FullAfter,
	}}, nil
}

// end ends the process as Close of a limiter does.
func (p *process) end(t *testing.T) {
	t.Helper()
	p.Shut()
	require.NoError(t, p.Close(t.Context()))
}
