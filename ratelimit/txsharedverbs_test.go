package ratelimit

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// For every verb, the wait is part of the first statement, and the answer is the same as without a wait.
func TestEveryVerbWaitsForItsSharedTurn(t *testing.T) {
	t.Parallel()
	bucketed := Define("bucketed", TokenBucket{Rate: 10, Period: 36525 * Day, MaxReserved: 10}).For("key")
	other := Define("other", PerHour(10)).For("key")
	sliding := Define("sliding", SlidingWindow{Rate: 10, Period: time.Hour}).For("key")
	sharded := Define("sharded", TokenBucket{Rate: 10, Period: 36525 * Day, Shards: 2}).For("key")
	slots := Define("slots", Concurrency{Most: 10}).For("key")
	allows := func(d Decision, err error) error {
		if err == nil {
			err = d.Err()
		}
		return err
	}
	verbs := map[string]func(t *testing.T, l *Limiter) error{
		"take":    func(t *testing.T, l *Limiter) error { t.Helper(); return allows(l.Take(t.Context(), bucketed)) },
		"two":     func(t *testing.T, l *Limiter) error { t.Helper(); return allows(l.Take(t.Context(), bucketed, other)) },
		"sliding": func(t *testing.T, l *Limiter) error { t.Helper(); return allows(l.Take(t.Context(), sliding)) },
		"sharded": func(t *testing.T, l *Limiter) error { t.Helper(); return allows(l.Take(t.Context(), sharded)) },
		"credit":  func(t *testing.T, l *Limiter) error { t.Helper(); return l.Credit(t.Context(), bucketed) },
		"charge":  func(t *testing.T, l *Limiter) error { t.Helper(); return l.Charge(t.Context(), bucketed) },
		"reset":   func(t *testing.T, l *Limiter) error { t.Helper(); return l.Reset(t.Context(), bucketed) },
		"up to": func(t *testing.T, l *Limiter) error {
			t.Helper()
			n, d, err := l.TakeUpTo(t.Context(), 3, bucketed)
			require.Equal(t, 3, n)
			return allows(d, err)
		},
		"refused": func(t *testing.T, l *Limiter) error {
			t.Helper()
			d, err := l.Take(t.Context(), bucketed.Cost(5), other.Cost(10))
			require.True(t, err != nil || d.Allowed)
			if err == nil {
				d, err = l.Take(t.Context(), bucketed, other.Cost(10))
			}
			require.False(t, d.Allowed)
			return err
		},
		"reserve": func(t *testing.T, l *Limiter) error {
			t.Helper()
			r, err := l.Reserve(t.Context(), bucketed.Cost(10))
			require.True(t, err != nil || r.Allowed)
			return err
		},
		"acquire": func(t *testing.T, l *Limiter) error {
			t.Helper()
			lease, err := l.Acquire(t.Context(), slots)
			require.True(t, err != nil || lease.Allowed)
			return err
		},
	}
	for name, verb := range verbs {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec} {
				b := newSharing(t, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode })
				for _, limit := range []string{"bucketed", "other", "sliding", "sharded", "slots"} {
					for shard := range int32(2) {
						b.limiter.queues.Conflict([]bucket.Key{{Name: limit, Key: "key", Shard: shard}})
					}
				}
				require.NoError(t, b.limiter.InTx(t.Context(), func(tx pgx.Tx) error {
					err := verb(t, b.limiter.WithTx(tx))
					held, _ := b.turns(t)
					require.Equal(t, 1, held)
					return err
				}))
				b.requireNoTurns(t)
			}
		})
	}
}
