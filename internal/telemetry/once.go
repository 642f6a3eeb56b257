package telemetry

import (
	"cmp"
	"sync"
)

// maxOnce bounds the texts of a Once by default. A client may choose them.
const maxOnce = 100

// Once finds what was not seen before, for warnings that are worth one line each, and for labels. The zero Once is ready
// for use. It is safe for concurrent use.
type Once struct {
	// Most is how many texts it has room for. Defaults to 100.
	Most int

	mu   sync.RWMutex
	seen map[string]bool
}

// IsFirst reports whether text is new and there is room for it.
func (o *Once) IsFirst(text string) bool {
	isFirst, _ := o.See(text)
	return isFirst
}

// See reports whether text is new, and whether it is among the texts that there is room for.
func (o *Once) See(text string) (isFirst, isKnown bool) {
	most := cmp.Or(o.Most, maxOnce)
	o.mu.RLock()
	isKnown, isFull := o.seen[text], len(o.seen) >= most
	o.mu.RUnlock()
	if isKnown || isFull {
		return false, isKnown
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.seen[text] || len(o.seen) >= most {
		return false, o.seen[text]
	}
	if o.seen == nil {
		o.seen = make(map[string]bool)
	}
	o.seen[text] = true
	return true, true
}
