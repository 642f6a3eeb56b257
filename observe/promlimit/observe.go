package promlimit

import (
	"context"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

var _ ratelimit.Observer = (*Observer)(nil)

// other is the label of limits, rules and routes beyond the bound; no limit can have that name.
const other = "<other>"

// Observe counts event.
func (o *Observer) Observe(_ context.Context, e event.Event) {
	telemetry.Measure(e, func(instrument int, value float64, labels ...string) {
		m := &o.metrics[instrument]
		for i, label := range m.labels {
			if names := o.names[label]; names != nil && labels[i] != "" {
				if _, isKnown := names.See(labels[i]); !isKnown {
					labels[i] = other
				}
			}
		}
		m.record(value, labels)
	})
}
