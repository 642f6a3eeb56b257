package store

import (
	"sync"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// maxLevelled bounds the buckets that are remembered to be levelled. Those that are forgotten are looked at again.
const maxLevelled = 10_000

// levelled remembers buckets whose rows had to be settled together, and have all been: a row that is absent is full then, and
// need not be looked at with the others.
type levelled struct {
	mu    sync.RWMutex
	since map[levelledKey]struct{}
}

type levelledKey struct {
	bucket bucket.Key
	eras   *bucket.Eras
	era    int32
}

func levelledKeyOf(a *bucket.Ask) levelledKey {
	return levelledKey{bucket: a.Key.Whole(), eras: a.Terms.Eras, era: a.Terms.Era}
}

// note remembers the bucket of the ask.
func (l *levelled) note(a *bucket.Ask) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.since == nil || len(l.since) >= maxLevelled {
		l.since = make(map[levelledKey]struct{})
	}
	l.since[levelledKeyOf(a)] = struct{}{}
}

// SetLevelled tells the terms of the asks for which buckets that is known.
func (s *Store) SetLevelled(asks []bucket.Ask) {
	for i := range asks {
		a := &asks[i]
		if !a.Terms.Reshaped() {
			continue
		}
		s.levelled.mu.RLock()
		_, a.Terms.Levelled = s.levelled.since[levelledKeyOf(a)]
		s.levelled.mu.RUnlock()
	}
}
