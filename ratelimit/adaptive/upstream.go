package adaptive

import (
	"cmp"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	// maxUpstreams bounds the keys whose share a process knows.
	maxUpstreams = 10_000
	// maxPause bounds a pause that an upstream asks for.
	maxPause = 24 * time.Hour
	// exchanges is how often in an epoch a process writes its reports, and urgentExchanges how often it may if an upstream
	// asks for a pause.
	exchanges, urgentExchanges = 4, 20
)

// bucket names a bucket: the limit's name, and the key as stored.
type bucket struct{ name, key string }

func (b bucket) compare(o bucket) int {
	return cmp.Or(cmp.Compare(b.name, o.name), cmp.Compare(b.key, o.key))
}

// upstream is what a process knows of the upstream of one key.
type upstream struct {
	bucket

	of          *Limit
	made        atomic.Pointer[shared] // by the latest call
	share       atomic.Uint64          // that calls are held to, as its bits
	pausedUntil atomic.Int64           // by Policies.now; 0: it is not
	askedAt     atomic.Int64           // the latest exchange, by Policies.now; 0: there was none
	used        atomic.Bool            // since then

	mu      sync.Mutex
	known   float64 // the share as the table has it
	counted tally   // since the latest exchange
	retryAt int64   // the end of a pause that the upstream asked for since; 0: none
}

// Outcome is the answer of an upstream to a request.
type Outcome struct {
	// Throttled reports whether the upstream refused the request because there were too many, as with the HTTP status 429.
	Throttled bool
	// RetryAfter is how long the upstream wants no requests, as in its Retry-After header, or 0. If the limit has Apply,
	// the key is paused that long in all processes. More than a day counts as a day.
	RetryAfter time.Duration
}

// Report reports the outcome of a request, weighted by its cost, to the upstream of one of Config.Limits. Report each
// request once, including accepted ones, but not requests that the limit refused. limiter is the one that decided about
// the request, because it knows how the key is stored.
//
// It returns immediately: outcomes are counted in memory, even if the call's transaction rolls back, and written four
// times an epoch, beside the calls. If a write failed, the Observer receives an [event.Failed], and its outcomes are
// written next time, unless they may have been written. While another transaction holds a key's row, the key's outcomes
// stay in memory. If a process dies, its unwritten outcomes are lost.
//
// It returns ratelimit.ErrInvalidRequest for a limit that isn't in Config.Limits and for a RetryAfter below 0, and the
// errors of [ratelimit.Limiter.StoredKey] and of an invalid cost.
func (p *Policies) Report(limiter *ratelimit.Limiter, request ratelimit.Request, o Outcome) error {
	limit, cost := request.Limit(), request.Tokens()
	invalid := func(kind error, format string, args ...any) error {
		return fmt.Errorf("adaptive: report %q: %w: %s", limit.Name(), kind, fmt.Sprintf(format, args...))
	}
	switch {
	case limiter == nil:
		return invalid(ratelimit.ErrInvalidConfig, "the Limiter is nil; pass the one that took the request's tokens")
	case p.limits[limit.Name()] == nil:
		return invalid(ratelimit.ErrInvalidRequest, "it does not adapt; name it in Config.Limits")
	case !(cost >= 0) || math.IsInf(cost, 1):
		return invalid(ratelimit.ErrInvalidCost, "%v; a cost is a number from 0 up", cost)
	case o.RetryAfter < 0:
		return invalid(ratelimit.ErrInvalidRequest, "RetryAfter is %v; it is how long to wait, or 0", o.RetryAfter)
	}
	key, err := limiter.StoredKey(request)
	if err != nil {
		return fmt.Errorf("adaptive: report %q: %w", limit.Name(), err)
	}
	now := p.now()
	if u := p.find(bucket{limit.Name(), key}, now); u != nil {
		if u.made.Load() == nil { // no call has used it
			u.ruling(p.contractOf(limit, "", key), now)
		}
		u.count(cost, o, now)
		p.touch(u, now)
	}
	return nil
}

// Adapts reports whether a limit is one of Config.Limits. A nil p has none.
func (p *Policies) Adapts(limit ratelimit.Limit) bool {
	return p != nil && p.limits[limit.Name()] != nil
}

// contractOf returns the contract of a bucket.
func (p *Policies) contractOf(limit ratelimit.Limit, plan, key string) contract {
	c := contract{limit: limit}
	if p.config.Policies != nil {
		c.ruling = p.config.Policies.RulingFor(limit, plan, key)
	}
	return c
}

// ruling returns the ruling of the contract for the upstream. With Apply it is never nil: a call may name a bucket
// twice, and a Limiter accepts two rulings for it, because they can be versions of one, but no ruling beside one.
func (u *upstream) ruling(c contract, now int64) *ratelimit.Ruling {
	share, until := math.Float64frombits(u.share.Load()), u.pausedUntil.Load()
	if until <= now {
		until = 0
	}
	if made := u.made.Load(); made != nil && made.contract == c && made.share == share && made.until == until {
		return made.ruling
	}
	made := &shared{contract: c, share: share, until: until, ruling: c.ruling}
	if u.of.Apply {
		made.ruling = c.at(share, until)
	}
	u.made.Store(made)
	return made.ruling
}

// find returns the upstream of a key, and nil if its limit does not adapt or if there are too many keys.
func (p *Policies) find(k bucket, now int64) *upstream {
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
	u = &upstream{bucket: k, of: p.limits[k.name], known: 1}
	u.share.Store(math.Float64bits(1))
	p.of[k] = u
	return u
}

// sweep forgets keys that were not used in the last epoch, at most once a second, and reports whether there is room.
func (p *Policies) sweep(now int64) bool {
	const second = 1_000_000
	if p.sweptAt <= now && now < p.sweptAt+second {
		return false
	}
	p.sweptAt = now
	for k, u := range p.of {
		u.mu.Lock()
		if !u.used.Load() && u.counted.Outcomes == 0 && u.askedAt.Load()+u.of.Epoch.Microseconds() < now &&
			u.pausedUntil.Load() < now {
			delete(p.of, k)
		}
		u.mu.Unlock()
	}
	return len(p.of) < maxUpstreams
}

// isDue reports whether the key is due for an exchange at now. u.mu is held.
func (u *upstream) isDue(now int64) bool {
	interval := u.of.Epoch.Microseconds()
	switch {
	case u.retryAt != 0:
		interval /= urgentExchanges
	case u.counted.Outcomes > 0:
		interval /= exchanges
	}
	at := u.askedAt.Load()
	return at == 0 || now < at || now >= at+interval
}

// touch notes that the key was used, and begins an exchange when it is time for one.
func (p *Policies) touch(u *upstream, now int64) {
	u.used.Store(true)
	u.mu.Lock()
	due := u.isDue(now)
	u.mu.Unlock()
	if due {
		p.begin()
	}
}

// count counts an outcome of a request with this cost.
func (u *upstream) count(cost float64, o Outcome, now int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.counted.Outcomes++
	if o.Throttled {
		u.counted.Throttled += cost
	} else {
		u.counted.Accepted += cost
	}
	if o.RetryAfter == 0 {
		return
	}
	until := now + min(o.RetryAfter, maxPause).Microseconds()
	if known := u.pausedUntil.Load(); until > known {
		u.pausedUntil.Store(until)
		if until > known+o.RetryAfter.Microseconds()/urgentExchanges { // news
			u.retryAt = max(u.retryAt, until)
		}
	}
}
