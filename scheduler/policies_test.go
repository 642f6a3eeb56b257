package scheduler_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// ruled is the rule of one limit for the plan pro, and none for the others. It changes while the program runs.
type ruled struct {
	rule atomic.Pointer[ratelimit.Ruling]
}

func (r *ruled) RulingFor(_ ratelimit.Limit, plan, _ string) *ratelimit.Ruling {
	if plan == "pro" {
		return r.rule.Load()
	}
	return nil
}

func (r *ruled) RulingsOf(string) []*ratelimit.Ruling { return []*ratelimit.Ruling{r.rule.Load()} }

// set states what the plan has.
func (r *ruled) set(t *testing.T, limit ratelimit.Limit, era ratelimit.Era) {
	t.Helper()
	rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Name: "pro", Eras: []ratelimit.Era{era}})
	require.NoError(t, err)
	r.rule.Store(rule)
}

func TestPolicies(t *testing.T) {
	t.Parallel()
	small := ratelimit.Define("small", ratelimit.TokenBucket{Rate: 10, Period: time.Hour, MaxReserved: ratelimit.None})
	large := ratelimit.Era{Policy: ratelimit.TokenBucket{Rate: 1000, Period: time.Hour, MaxReserved: ratelimit.None}}

	t.Run("APlanIsKeptForTheRetriesThatPay", func(t *testing.T) {
		t.Parallel()
		r := &ruled{}
		r.set(t, small, large)
		f := setup(t, stopped, func(s *settings) { s.limiter.Policies, s.scheduler.RetriesPay = r, true })
		_, err := f.tryEnqueue(t.Context(), nil, small.For("acme").Cost(400))
		require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity, "who is on no plan")
		attempts := 0
		events := f.start(t, func(context.Context, *river.Job[taskArgs]) error {
			if attempts++; attempts == 1 {
				return errors.New("try again")
			}
			return nil
		})
		f.enqueue(t, nil, small.For("acme").Plan("pro").Cost(400))
		await(t, events, 1, river.EventKindJobCompleted)
		require.Equal(t, 200.0, f.held(t, small, "acme"), "two attempts by the plan's policy")
	})

	t.Run("AJobWaitsForTheEndOfAPause", func(t *testing.T) {
		t.Parallel()
		r := &ruled{}
		r.set(t, small, large)
		var c *clock
		f := setup(t, func(s *settings) { c = onClock(s); s.limiter.Policies = r })
		before := f.enqueue(t, nil, small.For("acme").Plan("pro"))
		require.Equal(t, c.now(), before.ReadyAt)
		until := c.now().Add(time.Second)
		r.rule.Store(r.rule.Load().Paused(until, ""))
		require.Equal(t, until, f.enqueue(t, nil, small.For("acme").Plan("pro")).ReadyAt)

		var early atomic.Int64
		events := f.start(t, func(context.Context, *river.Job[taskArgs]) error {
			if c.now().Before(until) {
				early.Add(1)
			}
			return nil
		})
		await(t, events, 1, river.EventKindJobSnoozed)
		c.move(time.Second)
		await(t, events, 2, river.EventKindJobCompleted)
		require.Zero(t, early.Load())
	})
}
