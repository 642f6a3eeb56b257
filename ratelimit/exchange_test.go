package ratelimit

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// onRule is a source without rules that runs a function for each request, before the request reads its price.
type onRule func()

func (f onRule) RuleFor(Limit, string, string) *Rule { f(); return nil }
func (onRule) RulesOf(string) []*Rule                { return nil }

// TestACallReadsItsPricesBeforeAnExchangeBegins: an exchange that begins with the first price of a call could change the second.
func TestACallReadsItsPricesBeforeAnExchangeBegins(t *testing.T) {
	t.Parallel()
	api := Define("api", Adaptive{Contract: PerSecond(100), Apply: true})
	keys := []string{"ada", "bob", "eve"}
	for name, c := range map[string]struct {
		call  func(*Limiter, ...Request) error
		plans int
	}{
		"Take": {func(l *Limiter, r ...Request) error { _, err := l.Take(t.Context(), r...); return err }, 1},
		"Wait": {func(l *Limiter, r ...Request) error { _, err := l.Wait(t.Context(), r...); return err }, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var limiter *Limiter
			asked := 0
			touched := func() (n int) {
				for _, key := range keys {
					if u := limiter.prices.find(bucket.Key{Name: "api", Key: key}, 1); u.used.Load() || u.askedAt.Load() != 0 {
						n++
					}
				}
				return n
			}
			policies := onRule(func() {
				asked++
				require.Zero(t, touched(), "before price %d", asked)
			})
			pool, err := pgxpool.New(t.Context(), "host=/nowhere")
			require.NoError(t, err)
			defer pool.Close()
			limiter, err = New(pool, Config{Policies: policies, AsOf: func() time.Time { return time.UnixMicro(1) }})
			require.NoError(t, err)
			_ = c.call(limiter, api.For(keys[0]), api.For(keys[1]), api.For(keys[2])) // there is no server
			require.Equal(t, c.plans*len(keys), asked)
			require.Equal(t, len(keys), touched())
		})
	}
}
