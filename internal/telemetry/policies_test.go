package telemetry_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// stored is the one rule there is, which changes while the program runs.
type stored struct {
	rule atomic.Pointer[ratelimit.Ruling]
}

func (s *stored) RulingFor(ratelimit.Limit, string, string) *ratelimit.Ruling { return s.rule.Load() }

func (s *stored) RulingsOf(string) []*ratelimit.Ruling { return []*ratelimit.Ruling{s.rule.Load()} }

// told remembers what became of requests.
type told struct {
	mu  sync.Mutex
	all []string
}

func (o *told) Observe(_ context.Context, event ratelimit.Event) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if d, ok := event.(ratelimit.Decided); ok {
		for i, request := range requests(d) {
			o.all = append(o.all, d.Decision.States[i].Rule+" "+request)
		}
	}
}

// TestWhatDecidedIsTold promises that a request is reported with the rule of its policy, and with the kind of that policy. A pause
// is no rule, so it changes neither.
func TestWhatDecidedIsTold(t *testing.T) {
	t.Parallel()
	s, o := &stored{}, &told{}
	now := time.Date(2026, time.March, 9, 10, 0, 0, 0, time.UTC)
	limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{Policies: s, Observer: o, AsOf: func() time.Time { return now }})
	require.NoError(t, err)
	ofOne := ratelimit.FixedWindow{Rate: 1, Period: time.Hour, Start: now}
	for _, config := range []*ratelimit.RulingConfig{
		nil,
		{Name: "window", Eras: []ratelimit.Era{{Policy: ofOne}}},
		{Name: "window", Eras: []ratelimit.Era{{Policy: ofOne}}},
		{Name: "tried", Eras: []ratelimit.Era{{Policy: ofOne, Mode: ratelimit.Shadow}}},
		{Name: "off", Eras: []ratelimit.Era{{Mode: ratelimit.Off}}},
		{Name: "paused", PausedUntil: now.Add(time.Minute)},
		{Name: "window", Eras: []ratelimit.Era{{Policy: ofOne}}, PausedUntil: now.Add(time.Minute)},
	} {
		s.rule.Store(nil)
		if config != nil {
			rule, err := ratelimit.NewRuling(perUser, *config)
			require.NoError(t, err)
			s.rule.Store(rule)
		}
		_, err := limiter.Take(t.Context(), perUser.For("ada"))
		require.NoError(t, err)
	}
	require.Equal(t, []string{
		" perUser token_bucket take allowed false", "window perUser fixed_window take allowed false",
		"window perUser fixed_window take refused false", "tried perUser fixed_window take shadow_refused false",
		"off perUser token_bucket take off false", " perUser token_bucket take paused false", "window perUser fixed_window take paused false",
	}, o.all)
}
