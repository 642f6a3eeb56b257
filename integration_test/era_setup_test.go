package integration_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// eraRules is a source of policies: the rule of each name.
type eraRules map[string]*ratelimit.Ruling

func (r eraRules) RulingFor(limit ratelimit.Limit, _, _ string) *ratelimit.Ruling {
	return r[limit.Name()]
}

func (r eraRules) RulingsOf(name string) []*ratelimit.Ruling {
	if rule := r[name]; rule != nil {
		return []*ratelimit.Ruling{rule}
	}
	return nil
}

// eraChange is what a rule says of a limit: a policy, and at the instant of the change another one.
type eraChange struct {
	before, after ratelimit.Policy
	onChange      ratelimit.OnChange
}

// changeInstant is when the limits of these tests change.
var changeInstant = clockNoon

// rule returns the rule for a limit.
func (c eraChange) rule(t *testing.T, limit ratelimit.Limit) *ratelimit.Ruling {
	t.Helper()
	rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Name: "changing", Eras: []ratelimit.Era{
		{Policy: c.before}, {From: changeInstant, Policy: c.after, OnChange: c.onChange},
	}})
	require.NoError(t, err)
	return rule
}

// changing returns a desk whose limits change at noon. The clock stands at a second before.
func (b *bundle) changing(t *testing.T, config ratelimit.Config, changes map[string]eraChange) *desk {
	t.Helper()
	rules := eraRules{}
	for name, c := range changes {
		rules[name] = c.rule(t, changingLimit(name))
	}
	config.Policies = rules
	d := b.desk(t, config)
	d.at(-time.Second)
	return d
}

// changingLimit is what the code says of a limit, which nothing goes by.
func changingLimit(name string) ratelimit.Limit {
	return ratelimit.Define(name, ratelimit.TokenBucket{Rate: 1e9, Period: time.Second})
}

// slowly is a policy that holds capacity tokens and gains less than a thousandth of one during a test.
func slowly(capacity float64, shards int) ratelimit.TokenBucket {
	return ratelimit.TokenBucket{Rate: capacity, Period: century, Capacity: capacity, Shards: shards}
}

// faster is slowly at twice the rate.
func faster(capacity float64, shards int) ratelimit.TokenBucket {
	return ratelimit.TokenBucket{Rate: 2 * capacity, Period: century, Capacity: capacity, Shards: shards}
}

// plant writes a row of a bucket of the limit that changes, as calls before have left it.
func (b *bundle) plant(t *testing.T, key string, shard int, value float64, ts time.Time) {
	t.Helper()
	if b.memory != nil {
		plantInMemory(t, b.memory, bucket.Key{Name: "limit", Key: key, Shard: int32(shard)}, bucket.State{Value: value, TS: ts.UnixMicro()})
		return
	}
	b.exec(t, fmt.Sprintf(`INSERT INTO %s.buckets (name, key, shard, value, ts) VALUES ('limit', $1, $2, $3, $4)`, b.schema),
		key, shard, value, ts.UnixMicro())
}

// admitted takes one token at a time, by so many callers at once, and returns how many are given.
func admitted(t *testing.T, limiter *ratelimit.Limiter, request ratelimit.Request, callers, each int) (given int) {
	t.Helper()
	counts := make([]int, callers)
	require.NoError(t, atonce.Do(callers, func(worker int) error {
		for range each {
			d, err := limiter.Take(t.Context(), request)
			if err != nil {
				return err
			}
			if d.Allowed {
				counts[worker]++
			}
		}
		return nil
	}))
	for _, n := range counts {
		given += n
	}
	return given
}

// undone runs fn in a transaction of the caller's that is rolled back.
func undone(t *testing.T, b *bundle, level pgx.TxIsoLevel, fn func(ctx context.Context, tx *ratelimit.Limiter)) {
	t.Helper()
	tx := b.begin(t, level)
	fn(t.Context(), b.limiter.WithTx(tx))
	require.NoError(t, tx.Rollback(t.Context()))
}
