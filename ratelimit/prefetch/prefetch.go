// Package prefetch answers Take from memory, for a key that thousands of calls a second share.
//
// A [Limiter] takes tokens of such a key in advance, gives them out in this process, and returns the rest:
//
//	hot, err := prefetch.New(limiter, prefetch.Config{Limits: prefetch.Limits{Messages: {For: time.Second}}})
//	...
//	defer hot.Close(ctx)
//	d, err := hot.Take(ctx, Messages.For(room))
//
// The limit still holds over all processes, with a known bound: see "Prefetched tokens" in docs/promises.md.
package prefetch

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Limits are the limits whose tokens a Limiter takes in advance.
type Limits map[ratelimit.Limit]Terms

// Terms say how tokens of a limit are kept.
type Terms struct {
	// For is how long the process keeps tokens at most: from 1ms to 1h. In any span t, all processes together admit at
	// most Capacity + Rate * (t + For) / Period tokens of a token bucket. A window's tokens are used in that window or not
	// at all.
	For time.Duration
}

// Config holds the settings of a Limiter.
type Config struct {
	// Limits are the limits whose tokens are taken in advance: a TokenBucket, a FixedWindow or a CalendarWindow, without
	// Shards. A rule can replace their policies.
	Limits Limits
	// Observer receives each answer from memory, as a [ratelimit.Decided] that is Cached. To count these calls with the
	// others, pass the ratelimit.Limiter's Observer. Defaults to nil: no events.
	Observer ratelimit.Observer
	// Report receives what became of prefetched tokens. It is called on any goroutine. Defaults to nil: no call.
	Report func(Event)
}

// Event counts a limit's prefetched tokens. Those that were taken, and neither returned nor lost, were used or are
// still kept.
type Event struct {
	Limit                 ratelimit.Limit
	Taken, Returned, Lost float64
}

// Limiter answers Take from memory where it can. It is safe for concurrent use. Make one for a *ratelimit.Limiter.
type Limiter struct {
	limiter limiter
	config  Config
	made    time.Time
	seed    maphash.Seed
	stripes [64]stripe
	count   atomic.Int64  // of holdings
	slots   chan struct{} // one for each return at once

	mu     sync.Mutex
	closed bool           // whether Close was called; then busy only falls
	busy   sync.WaitGroup // fetches and returns in progress
}

// limiter has the methods of a *ratelimit.Limiter that this package calls.
type limiter interface {
	Take(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Decision, error)
	CreditTaken(ctx context.Context, at time.Time, requests ...ratelimit.Request) error
	Resolve(r ratelimit.Request) ratelimit.Limit
}

const (
	// maxHoldings bounds the keys that a process keeps tokens of; calls for others go to the database.
	maxHoldings = 1 << 16
	// minCost is the smallest cost that a Limiter accepts.
	minCost = 1e-9
	// givingBack is how many statements return tokens at once.
	givingBack = 4
)

// New returns a Limiter that keeps no tokens yet. Calls that it can't answer go to limiter, which must be on a pool,
// not in a transaction. Errors wrap ratelimit.ErrInvalidConfig.
func New(limiter *ratelimit.Limiter, config Config) (*Limiter, error) {
	switch {
	case limiter == nil:
		return nil, fmt.Errorf("prefetch: %w: the limiter is nil; pass what ratelimit.New returned",
			ratelimit.ErrInvalidConfig)
	case limiter.InTransaction():
		return nil, fmt.Errorf("prefetch: %w: a limiter of WithTx; pass the one that ratelimit.New returned",
			ratelimit.ErrInvalidConfig)
	case len(config.Limits) == 0:
		return nil, fmt.Errorf("prefetch: %w: no Limits; name the limits to prefetch",
			ratelimit.ErrInvalidConfig)
	}
	for limit, terms := range config.Limits {
		if err := check(limit, terms); err != nil {
			return nil, fmt.Errorf("prefetch: %w: %q %w", ratelimit.ErrInvalidConfig, limit.Name(), err)
		}
	}
	return newOn(limiter, config), nil
}

func newOn(to limiter, config Config) *Limiter {
	config.Limits = maps.Clone(config.Limits)
	return &Limiter{
		limiter: to, config: config, made: time.Now(), seed: maphash.MakeSeed(),
		slots: make(chan struct{}, givingBack),
	}
}

// now returns the time since the Limiter was made, by which holdings end.
func (l *Limiter) now() time.Duration { return time.Since(l.made) }

func check(limit ratelimit.Limit, terms Terms) error {
	n := limit.Spec()
	switch {
	case limit == ratelimit.Limit{}:
		return errors.New("is the zero Limit; make it with ratelimit.Define")
	case !servable(&n):
		return fmt.Errorf("is %v; only tokens of a TokenBucket, a FixedWindow or a CalendarWindow without Shards can be "+
			"prefetched", limit.Policy())
	case n.Capacity == 0:
		return errors.New("has the Capacity None, which leaves nothing to prefetch; leave one of them out")
	case terms.For < time.Millisecond || terms.For > time.Hour:
		return fmt.Errorf("has a For of %v; use 1ms to 1h", terms.For)
	}
	return nil
}

// servable reports whether tokens of a limit with these numbers can be taken in advance.
func servable(n *ratelimit.Spec) bool {
	switch n.Kind {
	case ratelimit.KindTokenBucket, ratelimit.KindFixedWindow, ratelimit.KindCalendarWindow:
		return n.Shards <= 1
	default:
		return false
	}
}

// Take is [ratelimit.Limiter.Take], but answers a call for one of Config.Limits from memory, if this process keeps
// enough of the key's tokens. All other calls go to the ratelimit.Limiter, so a refusal is always the database's. A
// call can wait up to 250 ms for tokens that are being prefetched, in addition to ratelimit.Config.Timeout.
//
// The Remaining and ResetAfter of an answer from memory are estimates, and its Value is the row when it was last read,
// which lacks the tokens that this process keeps. Tokens are prefetched with a Take of their own, which the
// ratelimit.Limiter's Observer and Config.Refused receive.
func (l *Limiter) Take(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Decision, error) {
	if len(requests) != 1 || ctx == nil || ctx.Err() != nil {
		return l.limiter.Take(ctx, slices.Clone(requests)...) // so that requests stays on the caller's stack
	}
	request, cost, began := requests[0].Cost(0), requests[0].Tokens(), l.now()
	id := maphash.Comparable(l.seed, request)
	if d, kept := l.fromMemory(id, &request, cost, began); kept {
		l.tell(ctx, &d, began, began)
		return d, nil
	}
	terms, isListed := l.config.Limits[request.Limit()]
	if !isListed || !(cost >= minCost) {
		return l.limiter.Take(ctx, request.Cost(cost))
	}
	if l.awaitFetch(ctx, id, &request, cost) {
		now := l.now()
		if d, kept := l.fromMemory(id, &request, cost, now); kept {
			l.tell(ctx, &d, began, now)
			return d, nil
		}
	}
	d, err := l.limiter.Take(ctx, request.Cost(cost))
	if err == nil {
		l.noteAnswer(id, &request, &d, terms)
	}
	return d, err
}

// Require is [ratelimit.Limiter.Require], with Take.
func (l *Limiter) Require(ctx context.Context, requests ...ratelimit.Request) error {
	d, err := l.Take(ctx, requests...)
	if err != nil {
		return err
	}
	return d.Err()
}

// tell reports an answer from memory.
func (l *Limiter) tell(ctx context.Context, d *ratelimit.Decision, began, now time.Duration) {
	if l.config.Observer != nil {
		l.config.Observer.Observe(ctx, ratelimit.Decided{
			Verb: "take", Decision: *d, Began: l.made.Add(began), Elapsed: now - began, Cached: true,
		})
	}
}

// stripe has some of the holdings, by the hash of their request with a cost of 0, and their lock.
type stripe struct {
	mu sync.Mutex
	of map[uint64]*holding
	_  [48]byte // a cache line each
}

func (l *Limiter) stripe(id uint64) *stripe { return &l.stripes[id%uint64(len(l.stripes))] }

// fromMemory takes cost of the tokens that are kept, if they are enough.
func (l *Limiter) fromMemory(id uint64, of *ratelimit.Request, cost float64,
	now time.Duration,
) (d ratelimit.Decision, kept bool) {
	s := l.stripe(id)
	s.mu.Lock()
	h := s.of[id]
	if h == nil || !(h.left >= cost && cost >= minCost) || now >= h.from.ends || h.request != *of {
		s.mu.Unlock()
		return d, false
	}
	h.left -= cost
	h.usedAt = now
	from, left := h.from, h.left
	s.mu.Unlock()
	return from.answer(cost, left, now), true
}

// stock is the tokens of one Take, and the answer to it.
type stock struct {
	state       ratelimit.State
	at          time.Time // on the database's clock
	taken       float64
	sent, heard time.Duration // when the Take was sent and answered
	ends        time.Duration // when the rest may not be used any more
	resets      time.Duration // when their window ends, and nothing can be returned any more
}

// answer returns the decision on a call that got cost of the tokens, of which some are left.
func (f *stock) answer(cost, left float64, now time.Duration) ratelimit.Decision {
	states := []ratelimit.State{f.state}
	s, elapsed := &states[0], max(now-f.heard, 0)
	at := f.at.Add(elapsed)
	s.Cost, s.ResetAfter = cost, max(s.ResetAfter-elapsed, 0)
	s.Remaining = max(s.Value.At(at)+left, 0)
	return ratelimit.Decision{Allowed: true, Remaining: s.Remaining, ResetAfter: s.ResetAfter, At: at, States: states}
}
