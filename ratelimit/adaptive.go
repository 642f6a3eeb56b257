package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Adaptive follows what an upstream accepts. While the upstream refuses nothing, the Contract holds. When it throttles, requests cost
// more: with a price of 4 a request for one token takes 4, so that a quarter of the contract gets through. The bucket and
// its refill stay as they are, so that no change of the price reaches back.
//
//	var Upstream = ratelimit.Define("upstream", ratelimit.Adaptive{
//		Contract: ratelimit.TokenBucket{Rate: 100, Period: time.Second}, Apply: true,
//	})
//
// The price is worked out from outcomes, which the processes report with [Limiter.Report], or package httplimit's Transport
// for them. Once an Epoch one of all processes works it out, from what all of them have reported. Each key of the limit has a
// price of its own: make the account at the upstream the key.
//
//   - More than 1 % throttled: the share of the contract that is given is cut to 0.85 of what was accepted, but not below 0.7
//     of what it was; to 0.7 of what was accepted, where half or more was throttled. Ten outcomes are needed: an epoch
//     of fewer goes on, for up to ten. When a fifth or more is throttled, an epoch ends after a quarter of its time.
//   - Less sent than 0.7 of what was allowed: the share stays, as nobody knows whether there is more.
//   - Else it grows by Growth each second, up to the contract. With nobody reporting it stays.
//
// A process that has heard nothing yet goes by the contract. It asks at its first call, and then once an epoch, beside its
// calls and never in their way; while it cannot ask, as before migration 10 has been applied, what it knew last holds, and
// the Observer is told of a [Failed].
//
// A price makes no request impossible: a bucket that is full gives what its capacity would give at a price of 1, and owes
// the rest, which later requests wait for. Of a CalendarWindow at most the whole window is charged, unless more is asked. What
// was reserved is settled at the price at which it was reserved; of what is given back without a reservation, say the price
// that was charged, State.Charged, with [Request.Price].
//
// While a program with another Contract, or other numbers, uses the same name and key, as in a rolling deployment, both go
// by one share, each of its own Contract and down to its own Floor. When the database's clock steps back by more
// than a minute, the epoch begins again. In a transaction a price is charged with the tokens, and undone with them; what is reported is not.
type Adaptive struct {
	// Contract is the policy while nothing is throttled: a TokenBucket, a FixedWindow or a CalendarWindow. A price slows a
	// bucket down at once. Of a window it leaves fewer tokens, and does not spread them.
	Contract Policy
	// Floor is the smallest share of the contract that the price leaves, from 0.001 to 1. It keeps requests coming that
	// find out when the upstream has recovered. Defaults to 0.1.
	Floor float64
	// Growth is the share of the contract that is gained back each second without throttling, from 0.001 to 1. Defaults to
	// 0.04.
	Growth float64
	// Epoch is how long outcomes are collected before the price changes: from 100ms to an hour. Give it twice the time that
	// the upstream takes to answer, or more. Defaults to 2s.
	Epoch time.Duration
	// Apply charges the price, and pauses the key when its upstream asks for that. Without it the price is worked out and
	// told, and requests cost what they ask: to see what it would do first.
	Apply bool
}

const (
	minShare      = 0.001 // the smallest Floor and Growth
	maxPrice      = 1 / minShare
	defaultFloor  = 0.1
	defaultGrowth = 0.04
	minEpoch      = 100 * time.Millisecond
	defaultEpoch  = 2 * time.Second
)

// String returns the policy in words, as in "100 per second, adapting down to 0.1 of it".
func (p Adaptive) String() string {
	words := fmt.Sprintf("%v, adapting down to %v of it", p.Contract, p.withDefaults().Floor)
	if !p.Apply {
		words += ", in shadow"
	}
	return words
}

func (p Adaptive) withDefaults() Adaptive {
	if p.Floor == 0 {
		p.Floor = defaultFloor
	}
	if p.Growth == 0 {
		p.Growth = defaultGrowth
	}
	if p.Epoch == 0 {
		p.Epoch = defaultEpoch
	}
	return p
}

func (p Adaptive) compile() (bucket.Terms, error) {
	switch p.Contract.(type) {
	case TokenBucket, FixedWindow, CalendarWindow:
	default:
		return bucket.Terms{}, fmt.Errorf("its Contract is a %T; it must be a TokenBucket, a FixedWindow or a CalendarWindow", p.Contract)
	}
	p = p.withDefaults()
	switch {
	case !(p.Floor >= minShare && p.Floor <= 1):
		return bucket.Terms{}, fmt.Errorf("its Floor is %v; it must be a share of the contract from %v to 1, or 0 for %v", p.Floor, minShare, defaultFloor)
	case !(p.Growth >= minShare && p.Growth <= 1):
		return bucket.Terms{}, fmt.Errorf("its Growth is %v; it must be a share of the contract from %v to 1, or 0 for %v", p.Growth, minShare, defaultGrowth)
	case p.Epoch < minEpoch || p.Epoch > time.Hour:
		return bucket.Terms{}, fmt.Errorf("its Epoch is %v; it must be from %v to 1h, or 0 for %v", p.Epoch, minEpoch, defaultEpoch)
	}
	t, err := p.Contract.compile()
	if err == nil && t.Prefetch != 0 {
		err = errors.New("it has a Prefetch, and what is taken ahead cannot follow the price; leave that out")
	}
	if err != nil {
		return bucket.Terms{}, fmt.Errorf("its Contract cannot be used: %w", err)
	}
	return t, nil
}

// adapting returns the policy of a limit with these terms as its controller sees it.
func (p Adaptive) adapting(t bucket.Terms) bucket.Adapting {
	p = p.withDefaults()
	a := bucket.Adapting{
		Rate: t.Rate / t.Steps / (time.Duration(t.Step) * time.Microsecond).Seconds(), Floor: p.Floor, Growth: p.Growth, Epoch: p.Epoch, Applied: p.Apply,
	}
	if window, isCalendar := p.Contract.(CalendarWindow); isCalendar {
		a.Rate = window.Rate / lengthOf(window.Resets).Seconds()
	}
	return a
}

// lengthOf returns about how long a part of the calendar is.
func lengthOf(part Calendar) time.Duration {
	switch part {
	case Daily:
		return Day
	case Weekly:
		return Week
	case Monthly:
		return 30 * Day
	case Quarterly:
		return 91 * Day
	case Yearly:
	}
	return 365 * Day
}

const (
	// maxUpstreams bounds the keys of adaptive limits that a Limiter knows a price of; the contract holds for others.
	maxUpstreams = 10_000
	// retryAfterReason is the reason of the pause that an upstream has asked for.
	retryAfterReason = "the upstream's Retry-After"
	// exchanges of an epoch are how often a process tells what was reported to it, and urgentExchanges how often it may when
	// an upstream wants to be left alone.
	exchanges, urgentExchanges = 4, 20
)

// prices are what a Limiter knows of the upstreams of its adaptive limits, and what was reported to it of them. It asks the
// database, and tells it, in exchanges: one at a time, beside the calls.
type prices struct {
	limiter *Limiter // that New has made

	mu      sync.RWMutex
	of      map[bucket.Key]*upstream
	sweptAt int64 // in microseconds

	state    sync.Mutex
	underWay chan struct{} // closed when the exchange that is under way has ended; nil: none is
	closed   bool
}

// upstream is what a Limiter knows of the upstream of one key.
type upstream struct {
	key         bucket.Key
	share       atomic.Uint64 // of the contract, as its bits
	pausedUntil atomic.Int64  // by Config.estimate; 0: it is not
	askedAt     atomic.Int64  // the latest exchange, by Config.estimate; 0: there was none
	used        atomic.Bool   // since then

	mu                  sync.Mutex
	policy              Adaptive // that was used last
	terms               bucket.Terms
	outcomes            int64 // since the latest exchange
	accepted, throttled float64
	retryAt             int64 // the end of a pause that was asked for since; 0: none was
}

func newPrices(l *Limiter) *prices {
	return &prices{limiter: l, of: make(map[bucket.Key]*upstream)}
}

// checkPrice returns an error unless the price of the request is one.
func checkPrice(r *Request) error {
	if r.price != 0 && !(r.price >= 1 && r.price <= maxPrice) {
		return fmt.Errorf("%w: the price %v of %q; a price is a number from 1 to %v, as State.Price tells it", ErrInvalidCost, r.price, r.limit.Name(), maxPrice)
	}
	return nil
}

// mayHaveCharged reports whether a price may have been charged that a request for the subject names: by the definition in the code, or by
// any policy that its rule has had. What holds now does not tell.
func (s *subject) mayHaveCharged(r *Request) bool {
	if charges(r.limit.Policy()) || s.rule == nil {
		return charges(r.limit.Policy())
	}
	return slices.ContainsFunc(s.rule.eras, func(e era) bool { return charges(e.limit.Policy()) })
}

// charges reports whether a policy charges a price.
func charges(policy Policy) bool {
	a, adapts := policy.(Adaptive)
	return adapts && a.Apply
}

// price sets the price of a subject and the end of its pause, if its limit is adaptive. Then it also sets now to an estimate of the
// database's clock. The caller passes the upstream that price returns to touch: an exchange that runs beside the call begins after
// the call has read the price, and so never changes it. An exchange on a single connection ends before price reads.
func (p *prices) price(ctx context.Context, s *subject, r *Request, key string, now *int64) (u *upstream, err error) {
	policy, adapts := s.limit.Policy().(Adaptive)
	if !adapts {
		return u, nil
	}
	if err := checkPrice(r); err != nil {
		return u, err
	}
	s.price = 1
	if p != nil { // of a Simulation
		if *now == 0 {
			*now = p.limiter.config.estimate()
		}
		if u = p.find(bucket.Key{Name: s.limit.Name(), Key: key}, *now); u != nil {
			u.use(policy, s.limit.terms())
			if p.limiter.isConnection {
				p.touch(ctx, u, *now, false)
			}
			s.price = 1 / max(math.Float64frombits(u.share.Load()), policy.withDefaults().Floor)
			if until := u.pausedUntil.Load(); policy.Apply && until > *now {
				s.pausedUntil = until
			}
		}
	}
	if r.price != 0 {
		s.price = r.price
	}
	if policy.Apply {
		s.factor = s.price
	}
	return u, nil
}

// pausedUntil returns the end of the pause that the upstream of a key has asked for, as far as that is known, and the first
// of instants where it has not. Of a limit without a rule, whose policy now is not known, that counts which was used last.
func (p *prices) pausedUntil(k bucket.Key, now Policy) int64 {
	if p == nil {
		return bucket.MinInstant
	}
	p.mu.RLock()
	u := p.of[k]
	p.mu.RUnlock()
	if u == nil {
		return bucket.MinInstant
	}
	u.mu.Lock()
	policy := u.policy
	u.mu.Unlock()
	if _, isUnknown := now.(madeElsewhere); !isUnknown {
		policy, _ = now.(Adaptive)
	}
	if until := u.pausedUntil.Load(); policy.Apply && until != 0 {
		return until
	}
	return bucket.MinInstant
}

// find returns what is known of a key, and nil when there are too many of them.
func (p *prices) find(k bucket.Key, now int64) *upstream {
	p.mu.RLock()
	u := p.of[k]
	p.mu.RUnlock()
	if u != nil {
		return u
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if u = p.of[k]; u != nil {
		return u
	}
	if len(p.of) >= maxUpstreams && !p.sweep(now) {
		return nil
	}
	u = &upstream{key: k}
	u.share.Store(math.Float64bits(1))
	p.of[k] = u
	return u
}

// sweep forgets keys that were not used in the last epoch, at most once a second, and reports whether there is room.
func (p *prices) sweep(now int64) bool {
	const second = 1_000_000
	if p.sweptAt <= now && now < p.sweptAt+second {
		return false
	}
	p.sweptAt = now
	for k, u := range p.of {
		u.mu.Lock()
		epoch := u.policy.withDefaults().Epoch.Microseconds()
		if !u.used.Load() && u.outcomes == 0 && u.askedAt.Load()+epoch < now && u.pausedUntil.Load() < now {
			delete(p.of, k)
		}
		u.mu.Unlock()
	}
	return len(p.of) < maxUpstreams
}

// use notes the policy that the key is used with.
func (u *upstream) use(policy Adaptive, terms bucket.Terms) {
	u.mu.Lock()
	if u.policy != policy || u.terms != terms {
		u.policy, u.terms = policy, terms
	}
	u.mu.Unlock()
}

// isDue reports whether what is known of the key is to be exchanged at now. u.mu is held.
func (u *upstream) isDue(now int64) bool {
	interval := u.policy.withDefaults().Epoch.Microseconds()
	switch {
	case u.retryAt != 0:
		interval /= urgentExchanges
	case u.outcomes > 0:
		interval /= exchanges
	}
	at := u.askedAt.Load()
	return at == 0 || now < at || now >= at+interval
}

// touchAll touches the upstreams of a call. By then the call has read all its prices, so that no exchange changes some of them:
// Wait makes two plans before it runs the first.
func (p *prices) touchAll(ctx context.Context, of *plan) {
	for _, u := range of.upstreams {
		p.touch(ctx, u, of.now, false)
	}
}

// touch notes that the key was used, and begins an exchange when it is time for one. A nil u does nothing.
func (p *prices) touch(ctx context.Context, u *upstream, now int64, inTx bool) {
	if u == nil {
		return
	}
	u.used.Store(true)
	u.mu.Lock()
	due := u.isDue(now)
	u.mu.Unlock()
	if due {
		p.begin(ctx, inTx)
	}
}
