package rules_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// TestCancelAfterTheRuleIsDeleted promises that a reservation's tokens return in a program that has not used the limit
// yet, after the rule that they were reserved under was deleted: of each kind that reserves, and with an override that
// stays.
func TestCancelAfterTheRuleIsDeleted(t *testing.T) {
	t.Parallel()
	const long = 24_000 * time.Hour // nothing arrives during the test
	for name, policy := range map[string]ratelimit.Policy{
		"bucket":   ratelimit.TokenBucket{Rate: 100, Period: long},
		"sharded":  ratelimit.TokenBucket{Rate: 100, Period: long, Shards: 4},
		"window":   ratelimit.FixedWindow{Rate: 100, Period: long},
		"shards":   ratelimit.FixedWindow{Rate: 100, Period: long, Shards: 2},
		"calendar": ratelimit.CalendarWindow{Rate: 100, Resets: ratelimit.Yearly},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, limit := setup(t), ratelimit.Define("messages", policy)
			store := f.immediate(t)
			made(t)(store.Put(t.Context(), why, rules.Rule{Limit: "messages", Policy: policy}))
			made(t)(store.Override(t.Context(), why, rules.Override{Limit: "messages", Key: "ana", Multiplier: 2}))
			f.load(t)
			ids := map[string]string{}
			for _, key := range []string{"ana", "bob"} {
				r, err := f.at(t, f.now(t)).Reserve(t.Context(), limit.For(key).Cost(10))
				require.NoError(t, err)
				ids[key] = r.ID
			}
			made(t)(store.Delete(t.Context(), why, "messages", ""))
			for key, defined := range map[string][]ratelimit.Limit{"ana": nil, "bob": {limit}} {
				var err error
				f.set, err = rules.NewSet(f.pool, rules.Config{Limits: defined})
				require.NoError(t, err)
				f.load(t)
				prunes := f.set.RulingsOf("messages")[0].Config()
				require.NoError(t, f.at(t, f.now(t)).Cancel(t.Context(), ids[key]))
				require.Equal(t, prunes, f.set.RulingsOf("messages")[0].Config(), "a reservation defines no limit")
				v, err := f.at(t, f.now(t)).Value(t.Context(), limit.For(key))
				require.NoError(t, err)
				require.InDelta(t, map[string]float64{"ana": 200, "bob": 100}[key], v.Tokens, 0.1)
			}
		})
	}
}
