package telemetry

import "sync"

// maxOnce bounds the texts of a Once. A client may choose them.
const maxOnce = 100

// Once finds what was not seen before, for warnings that are worth one line each. The zero Once is ready for use, and
// has room for a hundred texts. It is safe for concurrent use.
type Once struct {
	mu   sync.RWMutex
	seen map[string]bool
}

// IsFirst reports whether text is new and there is room for it.
func (o *Once) IsFirst(text string) bool {
	o.mu.RLock()
	isKnown := o.seen[text] || len(o.seen) >= maxOnce
	o.mu.RUnlock()
	if isKnown {
		return false
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.seen[text] || len(o.seen) >= maxOnce {
		return false
	}
	if o.seen == nil {
		o.seen = make(map[string]bool)
	}
	o.seen[text] = true
	return true
}
