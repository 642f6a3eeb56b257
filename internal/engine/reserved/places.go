package reserved

import (
	"sync"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// Place is the bucket of a reservation, or its buckets.
type Place struct {
	Key    bucket.Key
	Plan   string
	Others []Place // the buckets behind the first
}

// Place returns the buckets of the reservation.
func (r *Reservation) Place() Place {
	at := Place{Key: r.Buckets[0].Key, Plan: r.Buckets[0].Plan}
	for _, b := range r.Buckets[1:] {
		at.Others = append(at.Others, Place{Key: b.Key, Plan: b.Plan})
	}
	return at
}

// Places remembers the buckets of the latest reservations that a process has made, because Cancel names an ID only. The
// zero value remembers none.
type Places struct {
	mu            sync.Mutex
	recent, older map[string]Place
}

// mostRecent is how many reservations recent holds, before it becomes older. Each takes about 200 bytes.
const mostRecent = 5000

// Note remembers the buckets of a reservation of asks, and the plans of their keys.
func (p *Places) Note(id string, asks []bucket.Ask, plans []string) {
	at := Place{Key: asks[0].Key, Plan: plans[0]}
	if len(asks) > 1 {
		at.Others = make([]Place, len(asks)-1)
		for i := range at.Others {
			at.Others[i] = Place{Key: asks[i+1].Key, Plan: plans[i+1]}
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.recent == nil || len(p.recent) >= mostRecent {
		p.recent, p.older = make(map[string]Place), p.recent
	}
	p.recent[id] = at
}

// Of returns the buckets of a reservation, if they are known.
func (p *Places) Of(id string) (at Place, known bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if at, known = p.recent[id]; !known {
		at, known = p.older[id]
	}
	return at, known
}
