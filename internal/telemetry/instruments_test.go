package telemetry_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TestInstruments promises that names are unique, that a histogram and no other instrument has bounds, and that each measurement has
// a value for each label.
func TestInstruments(t *testing.T) {
	t.Parallel()
	instruments, seen := telemetry.Instruments(), map[string]bool{}
	for _, i := range instruments {
		require.False(t, seen[i.Prometheus] || seen[i.OTel], i.Prometheus)
		seen[i.Prometheus] = true
		seen[i.OTel] = i.OTel != ""
		require.NotEmpty(t, i.Help)
		require.NotEmpty(t, i.Unit)
		require.Equal(t, i.Kind == telemetry.Histogram, i.Bounds != nil, i.Prometheus)
	}
	measured := map[int]bool{}
	limit := ratelimit.Define("limit", ratelimit.PerSecond(1))
	decision := ratelimit.Decision{Allowed: true, States: []ratelimit.State{{Limit: limit, Allowed: true, Rule: "rule"}}}
	for _, event := range []ratelimit.Event{
		ratelimit.Decided{Verb: "reserve", Decision: decision},
		ratelimit.Failed{Verb: "take", Err: ratelimit.ErrContended},
		ratelimit.Failed{Verb: "take", Err: errors.New("lost")},
		ratelimit.Settlement{Delta: 1},
		ratelimit.Leased{},
		ratelimit.Conflicted{},
		ratelimit.Batched{},
		ratelimit.Queued{},
		ratelimit.Pruned{},
		ratelimit.Mended{},
		ratelimit.Answered{},
		ratelimit.RulesLoaded{},
		ratelimit.PriceChanged{},
		ratelimit.Prefetched{Taken: 1},
	} {
		telemetry.Measure(event, func(instrument int, _ float64, labels ...string) {
			require.Len(t, labels, len(instruments[instrument].Labels), instruments[instrument].Prometheus)
			measured[instrument] = true
		})
	}
	require.Len(t, measured, len(instruments))
}
