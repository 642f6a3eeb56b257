package integration_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The first call after the instant of a change writes the row under its lock, and the next one takes one round trip.
func TestARowIsSettledOnceAndThenOnTheFastPath(t *testing.T) {
	t.Parallel()
	w := &wire{}
	change := eraChange{before: ratelimit.PerMinute(10), after: ratelimit.PerMinute(100), onChange: ratelimit.ScaleTokens}
	d := setup(t, w.on).changing(t, ratelimit.Config{NoBatching: true}, map[string]eraChange{"limit": change})
	request := changingLimit("limit").For("key")
	take := func() { requireAllowed(t, taking(request), d.limiter) }
	requireAllowed(t, taking(request.Cost(5)), d.limiter)
	d.at(0)
	settled := w.count(take)
	if next := w.count(take); !generalPath {
		require.Greater(t, settled, 1, "under the lock of its row")
		require.Equal(t, 1, next)
	}
	require.InDelta(t, 51.67-2, tokens(t, d.limiter, request), 0.01, "5.167 of 10 became 51.67 of 100")
}

// countedSource is a source of one rule for all limits. It may panic instead.
type countedSource struct {
	rule   *ratelimit.Ruling
	panics bool
	asked  int
}

func (s *countedSource) RulingFor(ratelimit.Limit, string, string) *ratelimit.Ruling {
	if s.asked++; s.panics {
		panic("the source is out of order")
	}
	return s.rule
}

func (s *countedSource) RulingsOf(string) []*ratelimit.Ruling { return nil }

// If the source of rules panics or returns the rule of another limit, the definition in the code decides, and the Observer is notified.
func TestASourceThatFailsLeavesTheDefinitionInTheCode(t *testing.T) {
	t.Parallel()
	foreign, err := ratelimit.NewRuling(ratelimit.Define("other", ratelimit.PerMinute(3)), ratelimit.RulingConfig{})
	require.NoError(t, err)
	for name, source := range map[string]*countedSource{"it panics": {panics: true}, "it has a rule of another limit": {rule: foreign}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			heard := &failures{}
			limiter := inMemory.setup(t).with(t, ratelimit.Config{Policies: source, Observer: heard})
			d, err := limiter.Take(t.Context(), ratelimit.Define("api", ratelimit.PerMinute(10)).For("ada"))
			require.NoError(t, err)
			require.True(t, d.Allowed)
			require.InDelta(t, 9, d.Remaining, 0)
			require.Empty(t, d.States[0].Rule)
			require.Len(t, heard.told, 1)
			require.Equal(t, "api", heard.told[0].Limit)
			require.ErrorContains(t, heard.told[0].Err, "Config.Policies")
		})
	}
}

func TestTheSourceIsAskedOnceForEachRequest(t *testing.T) {
	t.Parallel()
	source := &countedSource{}
	limiter := inMemory.setup(t).with(t, ratelimit.Config{Policies: source})
	requireAllowed(t, taking(lookups.For("ada"), roomy.Global()), limiter)
	require.Equal(t, 2, source.asked)
}
