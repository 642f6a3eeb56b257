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
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// decided is a decision of a program.
type decided struct {
	at     int64 // microseconds since 1970
	policy string
	rules  int64 // the version of the stored rules that the program knew before the call
}

// program is a program with a pool and a Limiter of its own, whose workers take as fast as they can until it ends.
type program struct {
	stop  context.CancelFunc
	ended chan struct{}
	err   error

	mu        sync.Mutex
	decisions []decided
}

// programWorkers is how many workers a program has.
const programWorkers = 5

// startProgram starts a program, which ends with the test at the latest. take makes the call of a worker, and returns the version of the
// rules that were known before.
func startProgram(t *testing.T, take func() (d ratelimit.Decision, rules int64, err error)) *program {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	p := &program{stop: stop, ended: make(chan struct{})}
	go func() {
		defer close(p.ended)
		p.err = atonce.Do(programWorkers, func(int) error {
			for ctx.Err() == nil {
				d, rules, err := take()
				if err != nil {
					return err
				}
				p.mu.Lock()
				p.decisions = append(p.decisions, decided{d.At.UnixMicro(), d.States[0].Limit.Policy().String(), rules})
				p.mu.Unlock()
			}
			return nil
		})
	}()
	t.Cleanup(func() { _ = p.end() })
	return p
}

func (p *program) end() error {
	p.stop()
	<-p.ended
	return p.err
}

// await returns when the program has made n more decisions that are as asked for. A program that ends earlier fails the test.
func (p *program) await(t *testing.T, n int, is func(decided) bool) {
	t.Helper()
	p.mu.Lock()
	seen := len(p.decisions)
	p.mu.Unlock()
	world.Eventually(t, "the program has decided", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		for ; seen < len(p.decisions); seen++ {
			if is(p.decisions[seen]) {
				n--
			}
		}
		select {
		case <-p.ended:
			require.LessOrEqual(t, n, 0, "the program has ended: %v", p.err)
		default:
		}
		return n <= 0
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

// requireKept checks that a program which knew of an era before a call decided in it by its policy, and otherwise by an earlier one. It
// returns how many decisions were made in each era by its policy.
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

// ruled starts a program that learns of rules by notifications only.
func ruled(t *testing.T, url string) *program {
	t.Helper()
	w := world.Open(t, url)
	set, err := rules.NewSet(w.Pool, rules.Config{Poll: time.Hour})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = set.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	world.Eventually(t, "the rules are loaded", func() bool { return set.Version() > 0 })
	limiter, limit := w.With(t, ratelimit.Config{Policies: set}), ratelimit.Define("api", ratelimit.PerHour(7)) // by which nothing decides
	return startProgram(t, func() (d ratelimit.Decision, version int64, err error) {
		version = set.Version()
		d, err = limiter.Take(t.Context(), limit.For("ada"))
		return d, version, err
	})
}

// Three programs take as fast as they can. Meanwhile the rule of their limit changes, in its numbers and its kind, and the key has
// another plan for a while. TestAHistoryOfChangesCountsEveryToken counts the tokens of such changes.
func TestPoliciesChangeInAllProgramsAtOneInstant(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "a second for each change")
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
			p.await(t, 1, func(d decided) bool { return d.at > applied.From.Add(span).UnixMicro() && d.rules >= applied.Version })
		}
	}
	bucket := func(rate float64) ratelimit.Policy { return ratelimit.TokenBucket{Rate: rate, Period: 5 * time.Second} }
	put := func(store *rules.Store, rule rules.Rule) {
		applied, err := store.Put(t.Context(), edit, rule)
		note(rule.Policy, applied, err)
	}
	put(store(-1), rules.Rule{Limit: "api", Policy: bucket(100)})
	for range 3 {
		programs = append(programs, ruled(t, w.URL()))
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

	for _, p := range programs {
		require.NoError(t, p.end())
		require.NotContains(t, requireKept(t, eras, p.decisions), 0, "every program decides in every era: %v", eras)
	}
}
