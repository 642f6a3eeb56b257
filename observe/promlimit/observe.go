package promlimit

import (
	"context"
	"sync"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

var _ ratelimit.Observer = (*Observer)(nil)

// Observe counts event.
func (o *Observer) Observe(_ context.Context, e event.Event) {
	telemetry.Measure(e, func(instrument int, value float64, labels ...string) {
		m := &o.metrics[instrument]
		for i, label := range m.labels {
			if bounded := o.names[label]; bounded != nil {
				labels[i] = bounded.label(labels[i])
			}
		}
		m.record(value, labels)
	})
}

// other is the label of limits, rules and routes beyond the bound; no limit can have that name.
const other = "<other>"

// names bounds the values of a label: every series is memory here, and in Prometheus, for ever.
type names struct {
	most int

	mu   sync.RWMutex
	seen map[string]bool
}

func newNames(most int) *names { return &names{most: most, seen: map[string]bool{}} }

func (n *names) label(name string) string {
	n.mu.RLock()
	known, full := n.seen[name], len(n.seen) >= n.most
	n.mu.RUnlock()
	switch {
	case known, name == "":
		return name
	case full:
		return other
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.seen) >= n.most && !n.seen[name] {
		return other
	}
	n.seen[name] = true
	return name
}
