package reserved

import (
	"sync"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// Place is the bucket of a reservation, or the first of them.
type Place struct {
	Key     bucket.Key
	Plan    string
	Several bool // whether it has others, too
}

// Places remembers the buckets of the latest reservations that a process has made, because Cancel names an ID only. The
// zero value remembers none.
type Places struct {
	mu            sync.Mutex
	recent, older map[string]Place
}

// mostRecent is how many reservations recent holds, before it becomes older. Each takes about 200 bytes.
const mostRecent = 5000

// Note remembers the bucket of a reservation of asks.
func (p *Places) Note(id string, asks []bucket.Ask, plan string) {
	at := Place{Key: asks[0].Key, Plan: plan, Several: len(asks) > 1}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.recent == nil || len(p.recent) >= mostRecent {
		p.recent, p.older = make(map[string]Place), p.recent
	}
	p.recent[id] = at
}

// Of returns the bucket of a reservation, if that is known.
func (p *Places) Of(id string) (at Place, known bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if at, known = p.recent[id]; !known {
		at, known = p.older[id]
	}
	return at, known
}
