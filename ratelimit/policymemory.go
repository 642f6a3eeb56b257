package ratelimit

import (
	"sync"
	"sync/atomic"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

const (
	maxNames    = 10_000 // of limits whose policies a Limiter remembers
	maxPolicies = 16     // of one name
)

// policies remembers which policies a Limiter was used with under each name, so that what names a limit by its
// name alone, as a reservation does, is decided under the policy the limit has now. To note the policy that was
// noted last costs a look into a map and a comparison.
type policies struct {
	names sync.Map // of *usage by name
	count atomic.Int64
}

// usage is how a name was used.
type usage struct {
	last atomic.Pointer[bucket.Terms]              // the latest policy
	seen [maxPolicies]atomic.Pointer[bucket.Terms] // the distinct policies; the oldest one gives way to a new one

	mu   sync.Mutex
	next int // the place of the next policy in seen
}

// note notes that the limit called name was used with these terms.
func (p *policies) note(name string, t *bucket.Terms) {
	if p == nil {
		return
	}
	found, ok := p.names.Load(name)
	if !ok {
		if p.count.Load() >= maxNames {
			return
		}
		var loaded bool
		if found, loaded = p.names.LoadOrStore(name, &usage{}); !loaded {
			p.count.Add(1)
		}
	}
	found.(*usage).note(t)
}

// last returns the terms that the limit called name was last used with, if it was used at all.
func (p *policies) last(name string) (bucket.Terms, bool) {
	if p == nil {
		return bucket.Terms{}, false
	}
	found, ok := p.names.Load(name)
	if !ok {
		return bucket.Terms{}, false
	}
	last := found.(*usage).last.Load()
	if last == nil { // it is being noted
		return bucket.Terms{}, false
	}
	return *last, true
}

// seen returns the distinct terms that the limit called name was used with.
func (p *policies) seen(name string) (seen []bucket.Terms) {
	if p == nil {
		return nil
	}
	found, ok := p.names.Load(name)
	if !ok {
		return nil
	}
	u := found.(*usage)
	for i := range u.seen {
		if t := u.seen[i].Load(); t != nil {
			seen = append(seen, *t)
		}
	}
	return seen
}

func (u *usage) note(t *bucket.Terms) {
	if last := u.last.Load(); last != nil && *last == *t {
		return
	}
	if known := u.find(t); known != nil {
		u.last.Store(known)
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	known := u.find(t) // somebody may have been quicker
	if known == nil {
		added := *t
		known = &added
		u.seen[u.next%maxPolicies].Store(known)
		u.next++
	}
	u.last.Store(known)
}

// find returns the terms in seen that are equal to t, or nil.
func (u *usage) find(t *bucket.Terms) *bucket.Terms {
	for i := range u.seen {
		if known := u.seen[i].Load(); known != nil && *known == *t {
			return known
		}
	}
	return nil
}
