package processes_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// decided is a decision of a program.
type decided struct {
	at     int64 // microseconds since 1970
	policy string
	rules  int64 // the version of the stored rules that the program knew before the call
}

// program is a program with a pool and a Limiter of its own, whose workers take as fast as they can until it ends. It
// learns of rules by notifications only.
type program struct {
	stop    context.CancelFunc
	running sync.WaitGroup
	err     error // of the workers

	mu        sync.Mutex
	decisions []decided
}

// startProgram starts a program, which ends with the test at the latest.
func startProgram(t *testing.T, url string) *program {
	t.Helper()
	w := world.Open(t, url)
	set, err := rules.NewSet(w.Pool, rules.Config{Poll: time.Hour})
	require.NoError(t, err)
	limiter, limit := w.With(t, ratelimit.Config{Policies: set}), ratelimit.Define("api", ratelimit.PerHour(7)) // by which nothing decides
	ctx, stop := context.WithCancel(t.Context())
	p := &program{stop: stop}
	t.Cleanup(func() { _ = p.end() })
	p.running.Go(func() { _ = set.Run(ctx) })
	world.Eventually(t, "the rules are loaded", func() bool { return set.Version() > 0 })
	p.running.Go(func() {
		p.err = atonce.Do(5, func(int) error {
			for ctx.Err() == nil {
				version := set.Version()
				d, err := limiter.Take(t.Context(), limit.For("ada"))
				if err != nil {
					return err
				}
				p.mu.Lock()
				p.decisions = append(p.decisions, decided{d.At.UnixMicro(), d.States[0].Limit.Policy().String(), version})
				p.mu.Unlock()
			}
			return nil
		})
	})
	return p
}

func (p *program) end() error {
	p.stop()
	p.running.Wait()
	return p.err
}

// await returns when the program has made a decision as asked for.
func (p *program) await(t *testing.T, is func(decided) bool) {
	t.Helper()
	world.Eventually(t, "the program has decided", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return len(p.decisions) > 0 && is(p.decisions[len(p.decisions)-1])
	})
}

// noon is an instant at which windows begin.
var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// ruleEra is the time during which a policy holds, from an instant on.
type ruleEra struct {
	policy  string
	from    time.Time
	version int64 // of the rules that say so
}

// requireKept checks that a program which knew of an era before a call decided in it by its policy, and otherwise by an
// earlier one. It returns how many decisions were made in each era by its policy.
func requireKept(t *testing.T, eras []ruleEra, decisions []decided) []int {
	t.Helper()
	count := make([]int, len(eras))
	for _, d := range decisions {
		i := len(eras) - 1
		for i > 0 && d.at < eras[i].from.UnixMicro() {
			i--
		}
		if d.policy == eras[i].policy {
			count[i]++
			continue
		}
		late := time.Duration(d.at-eras[i].from.UnixMicro()) * time.Microsecond
		require.Less(t, d.rules, eras[i].version, "%v from its beginning %q was known, and %q decided", late, eras[i].policy, d.policy)
		require.True(t, slices.ContainsFunc(eras[:i], func(before ruleEra) bool { return before.policy == d.policy }), "%q decided too early", d.policy)
	}
	return count
}

// Three programs take as fast as they can. Meanwhile the rule of their limit changes, in its numbers and its kind, and
// the key has another plan for a while. TestAlgebraAgreesWithTheExactModel counts the tokens of such changes.
func TestPoliciesChangeInAllProgramsAtOneInstant(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "a second for each change")
	const lead, span = time.Second, 300 * time.Millisecond
	w, edit := world.New(t), rules.Edit{Author: "ada", Reason: "a test"}
	store := func(lead time.Duration) *rules.Store {
		store, err := rules.NewStore(w.Pool, rules.StoreConfig{Lead: lead})
		require.NoError(t, err)
		return store
	}
	var eras []ruleEra
	var programs []*program
	note := func(policy ratelimit.Policy, applied rules.Applied, err error) {
		require.NoError(t, err)
		eras = append(eras, ruleEra{policy.String(), applied.From, applied.Version})
		for _, p := range programs {
			p.await(t, func(d decided) bool { return d.at > applied.From.Add(span).UnixMicro() && d.rules >= applied.Version })
		}
	}
	bucket := func(rate float64) ratelimit.Policy { return ratelimit.TokenBucket{Rate: rate, Period: 5 * time.Second} }
	put := func(store *rules.Store, rule rules.Rule) {
		applied, err := store.Put(t.Context(), edit, rule)
		note(rule.Policy, applied, err)
	}
	put(store(-1), rules.Rule{Limit: "api", Policy: bucket(100)})
	for range 3 {
		programs = append(programs, startProgram(t, w.URL()))
	}
	ahead := store(lead)
	window := ratelimit.FixedWindow{Rate: 50, Period: 100 * time.Millisecond, Capacity: 1000, Start: noon}
	for _, rule := range []rules.Rule{
		{Policy: bucket(10), OnChange: ratelimit.ScaleTokens},
		{Policy: bucket(1000), OnChange: ratelimit.ScaleTokens},
		{Policy: window, OnChange: ratelimit.ResetTokens},
		{Policy: bucket(500), OnChange: ratelimit.ResetTokens},
	} {
		rule.Limit = "api"
		put(ahead, rule)
	}
	_, err := ahead.Put(t.Context(), edit, rules.Rule{Limit: "api", Plan: "pro", Policy: bucket(200)})
	require.NoError(t, err)
	until := time.Now().Add(3*lead + span) // by about what the database's clock says
	applied, err := ahead.Override(t.Context(), edit, rules.Override{Limit: "api", Key: "ada", OnPlan: "pro", Until: until})
	note(bucket(200), applied, err)
	applied.From = until
	note(bucket(500), applied, nil)

	for _, p := range programs {
		require.NoError(t, p.end())
		require.NotContains(t, requireKept(t, eras, p.decisions), 0, "every program decides in every era: %v", eras)
	}
}
