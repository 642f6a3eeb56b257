// Package adaptive knows the prices of adaptive limits: it counts what upstreams made of requests, and exchanges that with the other
// processes through the database. It knows the keys of buckets, and how contracts adapt.
package adaptive

import (
	"context"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

const (
	// maxUpstreams bounds the keys of adaptive limits that a process knows a price of; the contract holds for others.
	maxUpstreams = 10_000
	// maxPause bounds a pause that an upstream asks for.
	maxPause = 24 * time.Hour
	// exchanges is how often in an epoch a process writes its reports, and urgentExchanges how often it may if
	// an upstream asks for a pause.
	exchanges, urgentExchanges = 4, 20
)

// Owner is who the Prices work for.
type Owner interface {
	// Pass returns an error if no statement must be sent.
	Pass(ctx context.Context) error
	// MayBeKept reports whether the database may have kept the reports of an exchange that failed.
	MayBeKept(err error) bool
	// Estimate returns about what time it is for the database.
	Estimate() int64
	// Failed reports a failed exchange that began at began. limit is one of its limits.
	Failed(ctx context.Context, limit string, err error, began time.Time)
	// Changed reports a new price of a limit. decided says that this process has ended the epoch.
	Changed(ctx context.Context, limit string, before, price float64, applied, decided bool)
}

// Options are what Prices are made with.
type Options struct {
	Session *store.Session // on the pool
	Timeout time.Duration  // that an exchange may take; when it is not above 0, only exchangeTimeout counts
	// Busy reports whether the pool is a single connection that is in a transaction, so that no exchange may begin. nil: it has several.
	Busy func() bool
}

// Prices has the knowledge of a process about the upstreams of its adaptive limits, and its new reports. It exchanges both with the
// database: one exchange at a time, beside the calls. Nil Prices know nothing; simulations use them.
type Prices struct {
	owner   Owner
	options Options

	mu      sync.RWMutex
	of      map[bucket.Key]*Upstream
	sweptAt int64 // in microseconds

	state    sync.Mutex
	underWay chan struct{} // closed when the exchange that is under way has ended; nil: none is
	closed   bool
}

// Upstream is what a process knows of the upstream of one key.
type Upstream struct {
	key         bucket.Key
	share       atomic.Uint64 // of the contract, as its bits
	pausedUntil atomic.Int64  // by Owner.Estimate; 0: it is not
	askedAt     atomic.Int64  // the latest exchange, by Owner.Estimate; 0: there was none
	used        atomic.Bool   // since then

	mu                  sync.Mutex
	adapting            Adapting // of the policy that was used last
	outcomes            int64    // since the latest exchange
	accepted, throttled float64
	retryAt             int64 // the end of a pause that the upstream asked for since; 0: none
}

// New returns Prices that know nothing yet.
func New(owner Owner, options Options) *Prices {
	return &Prices{owner: owner, options: options, of: make(map[bucket.Key]*Upstream)}
}

// Use returns the upstream of a key with such a policy, and nil if there are too many keys.
func (p *Prices) Use(k bucket.Key, adapting Adapting, now int64) *Upstream {
	if p == nil {
		return nil
	}
	u := p.find(k, now)
	if u != nil {
		u.mu.Lock()
		u.adapting = adapting
		u.mu.Unlock()
	}
	return u
}

// UseNow is Use for a call. On a single connection an exchange that is due comes before, as none can run beside the call.
func (p *Prices) UseNow(ctx context.Context, k bucket.Key, adapting Adapting, now int64) *Upstream {
	u := p.Use(k, adapting, now)
	if u != nil && p.options.Busy != nil {
		p.Touch(ctx, u, now, false)
	}
	return u
}

// Price returns the price under a policy that adapts so, and until when the upstream wants no requests; 0: it does.
func (u *Upstream) Price(adapting Adapting) (price float64, pausedUntil int64) {
	return 1 / max(math.Float64frombits(u.share.Load()), adapting.Floor), u.pausedUntil.Load()
}

// PausedUntil returns the end of the pause that the upstream of a key requested, as far as it is known. It returns MinInstant if
// there is none, or if the policy does not apply it. A nil applied counts the policy that was used last.
func (p *Prices) PausedUntil(k bucket.Key, applied *bool) int64 {
	if p == nil {
		return bucket.MinInstant
	}
	p.mu.RLock()
	u := p.of[k]
	p.mu.RUnlock()
	if u == nil {
		return bucket.MinInstant
	}
	if applied == nil {
		u.mu.Lock()
		last := u.adapting.Applied
		u.mu.Unlock()
		applied = &last
	}
	if until := u.pausedUntil.Load(); *applied && until != 0 {
		return until
	}
	return bucket.MinInstant
}

// find returns the upstream of a key, and nil if there are too many keys.
func (p *Prices) find(k bucket.Key, now int64) *Upstream {
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
	u = &Upstream{key: k}
	u.share.Store(math.Float64bits(1))
	p.of[k] = u
	return u
}

// sweep forgets keys that were not used in the last epoch, at most once a second, and reports whether there is room.
func (p *Prices) sweep(now int64) bool {
	const second = 1_000_000
	if p.sweptAt <= now && now < p.sweptAt+second {
		return false
	}
	p.sweptAt = now
	for k, u := range p.of {
		u.mu.Lock()
		epoch := u.adapting.Epoch.Microseconds()
		if !u.used.Load() && u.outcomes == 0 && u.askedAt.Load()+epoch < now && u.pausedUntil.Load() < now {
			delete(p.of, k)
		}
		u.mu.Unlock()
	}
	return len(p.of) < maxUpstreams
}

// isDue reports whether the key is due for an exchange at now. u.mu is held.
func (u *Upstream) isDue(now int64) bool {
	interval := u.adapting.Epoch.Microseconds()
	switch {
	case u.retryAt != 0:
		interval /= urgentExchanges
	case u.outcomes > 0:
		interval /= exchanges
	}
	at := u.askedAt.Load()
	return at == 0 || now < at || now >= at+interval
}

// Touch notes that the key was used, and begins an exchange when it is time for one. A nil u does nothing.
func (p *Prices) Touch(ctx context.Context, u *Upstream, now int64, inTx bool) {
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

// Count counts an outcome of a request with this cost. The upstream wants no requests for retryAfter; 0: it does not say.
func (u *Upstream) Count(cost float64, throttled bool, retryAfter time.Duration, now int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.outcomes++
	if throttled {
		u.throttled += cost
	} else {
		u.accepted += cost
	}
	if retryAfter == 0 {
		return
	}
	until := now + min(retryAfter, maxPause).Microseconds()
	if known := u.pausedUntil.Load(); until > known {
		u.pausedUntil.Store(until)
		if until > known+retryAfter.Microseconds()/urgentExchanges { // news
			u.retryAt = max(u.retryAt, until)
		}
	}
}
