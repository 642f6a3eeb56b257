package integration_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// reloading is a source that has just loaded a change. Some calls in flight use the old rule, and others use one or another copy of
// the new one.
type reloading struct {
	rules []*ratelimit.Ruling
	asked atomic.Int64
}

func (r *reloading) RulingFor(limit ratelimit.Limit, _, _ string) *ratelimit.Ruling {
	if limit.Name() != "limit" {
		return nil
	}
	return r.rules[int(r.asked.Add(1))%len(r.rules)]
}

func (r *reloading) RulingsOf(string) []*ratelimit.Ruling { return r.rules }

// Calls of one batch may be under several rules for one bucket. Each is answered, and together they get what the bucket
// held, and at most what the policy before holds in addition.
func TestCallsAtOnceUnderSeveralRules(t *testing.T) {
	t.Parallel()
	for name, shards := range rowCounts() {
		for how, at := range map[string]time.Duration{"Before": -time.Microsecond, "AtTheInstant": 0, "After": time.Second} {
			for _, noBatching := range []bool{false, true} {
				if noBatching && at != 0 {
					continue
				}
				if noBatching {
					how += "NoBatching"
				}
				t.Run(name+how, func(t *testing.T) {
					t.Parallel()
					representative(t, name, "EightRows")
					b := setup(t)
					c := eraChange{before: slowly(80, shards), after: faster(80, shards)}
					old, err := ratelimit.NewRuling(changingLimit("limit"), ratelimit.RulingConfig{Eras: []ratelimit.Era{{Policy: c.before}}})
					require.NoError(t, err)
					source := &reloading{rules: []*ratelimit.Ruling{c.rule(t, changingLimit("limit")), old, c.rule(t, changingLimit("limit"))}}
					d := b.desk(t, ratelimit.Config{Policies: source, NoBatching: noBatching})
					d.at(-time.Second)
					for shard := range shards {
						b.plant(t, "key", shard, 40/float64(shards), d.clock.now())
					}
					d.at(at)
					given := callsOfAllKinds(t, d.limiter, changingLimit("limit").For("key"))
					require.GreaterOrEqual(t, given, 30, "nothing is lost but what a row cannot hold by the policy before")
					require.LessOrEqual(t, given, 40+80)
					if at < 0 {
						require.Equal(t, 40, given)
					}
				})
			}
		}
	}
}

// callsOfAllKinds makes calls of all kinds at once, and returns how many tokens they were given.
func callsOfAllKinds(t *testing.T, limiter *ratelimit.Limiter, request ratelimit.Request) int {
	t.Helper()
	var given atomic.Int64
	count := func(decision ratelimit.Decision, err error) error {
		if err == nil && decision.Allowed {
			given.Add(1)
		}
		return err
	}
	calls := []func(ctx context.Context) error{
		func(ctx context.Context) error { return count(limiter.Take(ctx, request)) },
		func(ctx context.Context) error { return count(limiter.Take(ctx, request, roomy.For("key"))) },
		func(ctx context.Context) error {
			_, err := limiter.Check(ctx, request)
			return err
		},
		func(ctx context.Context) error {
			r, err := limiter.Reserve(ctx, request, roomy.For("key"))
			if err != nil {
				return err
			}
			return limiter.Cancel(ctx, r.ID)
		},
		func(ctx context.Context) error { return limiter.Charge(ctx, request.Cost(0)) },
		func(ctx context.Context) error { return count(limiter.Take(ctx, request)) },
	}
	const workers, rounds = 6, 5
	require.NoError(t, atonce.Do(workers, func(worker int) error {
		for i := range rounds * len(calls) {
			if err := calls[(worker+i)%len(calls)](t.Context()); err != nil {
				return err
			}
		}
		return nil
	}))
	return int(given.Load()) + admitted(t, limiter, request, 1, 60) // the reservations in between are returned
}
