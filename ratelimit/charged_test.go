package ratelimit_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// lastDecided is an Observer that keeps the latest decision.
type lastDecided struct{ ratelimit.Decided }

func (l *lastDecided) Observe(_ context.Context, event ratelimit.Event) {
	if d, ok := event.(ratelimit.Decided); ok {
		l.Decided = d
	}
}

// A refusal from the refusal cache says which price a call would be charged, as the refusal of the database does.
func TestARefusalFromMemorySaysThePrice(t *testing.T) {
	t.Parallel()
	plain, other := ratelimit.Define("plain", ratelimit.PerDay(2)), ratelimit.Define("other", ratelimit.PerDay(20))
	told := ratelimit.Define("told", ratelimit.Adaptive{Contract: ratelimit.PerDay(20)})
	applied := ratelimit.Define("applied", ratelimit.Adaptive{Contract: ratelimit.PerDay(20), Apply: true})
	for name, test := range map[string]struct {
		requests []ratelimit.Request
		want     []float64
	}{
		"Plain":   {[]ratelimit.Request{plain.For("ada").Cost(2)}, []float64{1}},
		"Several": {[]ratelimit.Request{plain.For("ada").Cost(2), other.For("ada")}, []float64{1, 1}},
		"Told":    {[]ratelimit.Request{told.For("ada").Cost(20).Price(4)}, []float64{1}},
		"Applied": {[]ratelimit.Request{applied.For("ada").Cost(5).Price(4)}, []float64{4}},
		"Mixed":   {[]ratelimit.Request{other.For("ada"), applied.For("ada").Cost(5).Price(4)}, []float64{1, 4}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				last := &lastDecided{}
				limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{RefusalCache: 1000, Observer: last})
				require.NoError(t, err)
				for i := range 3 {
					d, err := limiter.Take(t.Context(), test.requests...)
					require.NoError(t, err)
					require.Equal(t, i == 0, d.Allowed)
					require.Equal(t, i == 2, last.Cached)
					for j, want := range test.want {
						require.InDelta(t, want, d.States[j].Charged, 0, "take %d, request %d", i, j)
					}
				}
			})
		})
	}
}

// Prefetched tokens are charged at a price of 1.
func TestTokensTakenAheadSayThePrice(t *testing.T) {
	t.Parallel()
	policy := ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: 10_000, Prefetch: 10 * time.Second}
	one, two := ratelimit.Define("one", policy), ratelimit.Define("two", policy)
	for name, requests := range map[string][]ratelimit.Request{"One": {one.For("ada")}, "Several": {one.For("bob"), two.For("bob")}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				limiter := ratelimittest.New(t, nil)
				for prefetched := false; !prefetched; {
					d, err := limiter.Take(t.Context(), requests...)
					require.NoError(t, err)
					require.True(t, d.Allowed)
					prefetched = d.States[0].Prefetched
					for i := range d.States {
						require.InDelta(t, 1, d.States[i].Charged, 0, "request %d, prefetched %v", i, prefetched)
					}
				}
			})
		})
	}
}
