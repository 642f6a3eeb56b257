package processes_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/child"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// ruled is a process whose workers take as fast as they can until its input ends. It learns of rules by notifications only.
func ruled(t *testing.T, url string, _ []string) {
	t.Helper()
	w := world.Open(t, url)
	set, err := rules.NewSet(w.Pool, rules.Config{Poll: time.Hour})
	require.NoError(t, err)
	limiter := w.With(t, ratelimit.Config{Policies: set})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = set.Run(ctx) })
	world.Eventually(t, "the rules are loaded", func() bool { return set.Version() > 0 })
	over, limit := child.InputEnded(t.Context()), ratelimit.Define("api", ratelimit.PerHour(7)) // while there is a rule, nothing decides by it
	require.NoError(t, atonce.Do(5, func(int) error {
		for over.Err() == nil {
			version := set.Version()
			d, err := limiter.Take(t.Context(), limit.For("ada"))
			if err != nil {
				return err
			}
			if err := report(d, version); err != nil {
				return err
			}
		}
		return nil
	}))
	cancel()
	running.Wait()
}

// ruleEra is the time during which a policy holds, from an instant on.
type ruleEra struct {
	policy  string
	from    time.Time
	version int64 // of the rules that say so
}

// ruleEras are the eras of a key, in order.
type ruleEras []ruleEra

// requireKept checks that a process which knew of an era before a call decided in it by its policy, and else by an earlier one. It
// returns how many decisions were made in each era by its policy.
func (e ruleEras) requireKept(t *testing.T, decisions []decided) []int {
	t.Helper()
	count := make([]int, len(e))
	for _, d := range decisions {
		i := len(e) - 1
		for i > 0 && d.At < e[i].from.UnixMicro() {
			i--
		}
		if d.Policy == e[i].policy {
			count[i]++
			continue
		}
		late := time.Duration(d.At-e[i].from.UnixMicro()) * time.Microsecond
		require.Less(t, d.Rules, e[i].version, "%v from its beginning %q was known, and %q decided", late, e[i].policy, d.Policy)
		require.True(t, slices.ContainsFunc(e[:i], func(before ruleEra) bool { return before.policy == d.Policy }), "%q decided too early", d.Policy)
	}
	return count
}

// Three processes take as fast as they can. Meanwhile the rule of their limit changes, in its numbers and its kind, and the key has
// another plan for a while. TestAHistoryOfChangesCountsEveryToken counts the tokens of such changes.
func TestPoliciesChangeInAllProcessesAtOneInstant(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "three processes, a second for each change")
	const lead, span = time.Second, 300 * time.Millisecond
	w, edit := world.New(t), rules.Edit{Author: "ada", Reason: "a test"}
	store := func(lead time.Duration) *rules.Store {
		store, err := rules.NewStore(w.Pool, rules.StoreConfig{Lead: lead})
		require.NoError(t, err)
		return store
	}
	var eras ruleEras
	var processes []*process
	note := func(policy ratelimit.Policy, applied rules.Applied, err error) {
		require.NoError(t, err)
		eras = append(eras, ruleEra{policy.String(), applied.From, applied.Version})
		for _, p := range processes {
			p.await(t, 1, func(d decided) bool { return d.At > applied.From.Add(span).UnixMicro() && d.Rules >= applied.Version })
		}
	}
	bucket := func(rate float64) ratelimit.Policy { return ratelimit.TokenBucket{Rate: rate, Period: 5 * time.Second} }
	put := func(store *rules.Store, rule rules.Rule) {
		applied, err := store.Put(t.Context(), edit, rule)
		note(rule.Policy, applied, err)
	}
	put(store(-1), rules.Rule{Limit: "api", Policy: bucket(100)})
	for range 3 {
		processes = append(processes, start(t, "ruled", w.URL()))
	}
	ahead := store(lead)
	window := ratelimit.FixedWindow{Rate: 50, Period: 100 * time.Millisecond, Capacity: 1000, Start: noon}
	for _, policy := range []ratelimit.Policy{bucket(10), bucket(1000), window, bucket(500)} {
		put(ahead, rules.Rule{Limit: "api", Policy: policy, OnChange: ratelimit.ScaleTokens})
	}
	_, err := ahead.Put(t.Context(), edit, rules.Rule{Limit: "api", Plan: "pro", Policy: bucket(200)})
	require.NoError(t, err)
	until := time.Now().Add(3*lead + span) // by about what the database's clock says
	applied, err := ahead.Override(t.Context(), edit, rules.Override{Limit: "api", Key: "ada", OnPlan: "pro", Until: until})
	note(bucket(200), applied, err)
	applied.From = until
	note(bucket(500), applied, nil)

	for _, p := range processes {
		require.NoError(t, p.End())
		require.NotContains(t, eras.requireKept(t, p.decisions), 0, "every process decides in every era: %v", eras)
	}
}
