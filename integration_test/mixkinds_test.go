package integration_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// leftOfFour returns what a program finds of ten a day, under its own kind, where another has left four at six in the evening. What
// windows have given counts as taken when they began: at noon, or at midnight.
func leftOfFour(writer, reader string) float64 {
	began := map[string]float64{"Fixed": 6, "Calendar": 18}[writer] // hours ago
	switch {
	case reader == "Bucket", reader == "Adaptive":
		return min(10, 4+began/24*10)
	case reader == "Fixed" && began > 6: // its window has begun since then
		return 10
	}
	return 4
}

// Two programs define one name as two kinds of limit. Tokens that one has taken are missing for the other, and neither fails on the
// other's rows.
func TestTwoKindsAtOneRow(t *testing.T) {
	t.Parallel()
	b := setup(t)
	kinds := map[string]ratelimit.Policy{
		"Bucket":   ratelimit.TokenBucket{Rate: 10, Period: ratelimit.Day},
		"Fixed":    ratelimit.FixedWindow{Rate: 10, Period: ratelimit.Day, Start: clockNoon},
		"Slides":   ratelimit.SlidingWindow{Rate: 10, Period: ratelimit.Day, Slices: 24},
		"Calendar": ratelimit.CalendarWindow{Rate: 10, Resets: ratelimit.Daily},
		"Adaptive": ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 10, Period: ratelimit.Day}, Apply: true},
	}
	for _, several := range []bool{false, true} {
		for one, policy := range kinds {
			for two, other := range kinds {
				t.Run(fmt.Sprintf("%s/%s/Several=%v", one, two, several), func(t *testing.T) {
					t.Parallel()
					if one != "Bucket" && two != "Bucket" {
						testsize.Long(t, "25 pairs of kinds; the short tier has those with a token bucket")
					}
					d := b.desk(t, ratelimit.Config{RefusalCache: 10})
					first, second := ratelimit.Define("row", policy).For(t.Name()), ratelimit.Define("row", other).For(t.Name())
					take := func(l *ratelimit.Limiter, request ratelimit.Request) bool {
						requests := []ratelimit.Request{request}
						if several {
							requests = append(requests, roomy.For(t.Name()))
						}
						answer, err := l.Take(t.Context(), requests...)
						require.NoError(t, err)
						return answer.Allowed
					}
					d.at(6 * time.Hour)
					require.True(t, take(d.limiter, first.Cost(4)))
					require.True(t, take(d.limiter, first.Cost(2)))
					left := leftOfFour(one, two)
					tx := b.begin(t, pgx.RepeatableRead) // the others in the table would fail a serializable one
					for _, l := range []*ratelimit.Limiter{d.limiter, d.limiter.WithTx(tx)} {
						v, err := l.Value(t.Context(), second)
						require.NoError(t, err)
						require.InDelta(t, left, v.Tokens, 1e-9)
						require.False(t, left < 10 && take(l, second.Cost(left+0.5)))
					}
					require.True(t, take(d.limiter.WithTx(tx), second.Cost(1)))
					require.NoError(t, tx.Commit(t.Context()))
					v, err := d.limiter.Value(t.Context(), first)
					require.NoError(t, err)
					require.LessOrEqual(t, v.Tokens, left-1+1e-9)
				})
			}
		}
	}
}
