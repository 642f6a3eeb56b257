package processes_test

import (
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

const (
	// eraLead is how long before it holds these tests make a change.
	eraLead = time.Second
	// eraSpan is how long of the database's clock an era lasts at least.
	eraSpan = 300 * time.Millisecond
)

// per5s is a token bucket that gains n in five seconds, so that nothing is lost to a full one in an era.
func per5s(n float64) rules.Rule {
	return rules.Rule{Limit: "api", Policy: ratelimit.TokenBucket{Rate: n, Period: 5 * time.Second}}
}

// windowOf1000 gains 50 with each window, and holds 1000.
func windowOf1000() rules.Rule {
	return rules.Rule{Limit: "api", Policy: ratelimit.FixedWindow{Rate: 50, Period: 100 * time.Millisecond, Capacity: 1000, Start: noon}}
}

// TestPoliciesChangeInAllProcessesAtOneInstant runs sixteen workers in three processes that take as fast as they can. Meanwhile the
// rule of their limit changes, in its numbers and its kind, and one key changes its plan.
func TestPoliciesChangeInAllProcessesAtOneInstant(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "three processes, a second for each change")
	w := world.New(t)
	l := emptied(t, w)
	f := startFleet(t, w, newStore(t, w, eraLead), 5, 5, 6)
	f.awaitTaken(t, time.UnixMicro(l[0].from).Add(eraSpan))

	scaled := per5s(500)
	scaled.OnChange = ratelimit.ScaleTokens
	for _, change := range []struct {
		name string
		rule rules.Rule
	}{{"a tenth", per5s(10)}, {"a hundred times", per5s(1000)}, {"windows", windowOf1000()}, {"a bucket again", scaled}} {
		l = append(l, fromRule(change.name, change.rule, f.put(t, change.rule)))
	}
	pro, until := per5s(200), time.Time{}
	overridden := f.overridePlan(t, slices.Clone(l), pro, &until)
	f.awaitTaken(t, until.Add(eraSpan))
	f.end(t)
	f.report(t, overridden)

	var decisions []taken
	for _, p := range f.processes {
		for i := range overridden {
			end := overridden.end(i, 1<<62)
			require.True(t, slices.ContainsFunc(p.took, func(d taken) bool { return d.at >= overridden[i].from && d.at < end }),
				"every process has decided in the era of %q", overridden[i].name)
		}
		decisions = append(decisions, p.took...)
	}
	t.Logf("%d decisions", len(decisions))
	decisions = append(decisions, wake(t, w))
	for key, holds := range map[string]law{"ada": overridden, "bob": l, sleeper: l} {
		began := 0.0
		if key == sleeper {
			began = -sleeperOwes
		}
		holds.requireKept(t, decisions, rowOf(t, w, key), began)
	}
}

// emptied states the first rule, and takes all that the buckets hold then.
func emptied(t *testing.T, w *world.World) law {
	t.Helper()
	first := per5s(100)
	applied, err := newStore(t, w, -1).Put(t.Context(), edit, first)
	require.NoError(t, err)
	limiter := w.With(t, ratelimit.Config{Policies: newSet(t, w)})
	tx := w.Begin(t, pgx.ReadCommitted)
	var d ratelimit.Decision
	for _, key := range append(slices.Clone(ruledKeys), sleeper) {
		d, err = limiter.WithTx(tx).Take(t.Context(), ruledCode.For(key).Cost(100))
		require.NoError(t, err)
		require.True(t, d.Allowed)
	}
	// All buckets count from one instant.
	_, err = tx.Exec(t.Context(), `UPDATE ratelimit.buckets SET ts = $1, value = CASE WHEN key = $2 THEN $3 ELSE value END`,
		d.At.UnixMicro(), sleeper, -sleeperOwes)
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	return law{{name: "the first", from: d.At.UnixMicro(), version: applied.Version, rule: first}}
}

// sleeper is a key without calls while the rule changes. It owes so much that it does not become full meanwhile.
const (
	sleeper     = "eve"
	sleeperOwes = 700.0
)

// wake takes from the key that has slept over all changes.
func wake(t *testing.T, w *world.World) taken {
	t.Helper()
	set := newSet(t, w)
	d, err := w.With(t, ratelimit.Config{Policies: set}).Take(t.Context(), ruledCode.For(sleeper))
	require.NoError(t, err)
	return taken{sleeper, d.At.UnixMicro(), d.Allowed, 1, set.Version(), d.States[0].Limit.Policy().String()}
}

// put changes the rule, and returns when every process has decided under it for a while.
func (f *fleet) put(t *testing.T, rule rules.Rule) rules.Applied {
	t.Helper()
	applied, err := f.store.Put(t.Context(), edit, rule)
	require.NoError(t, err)
	f.awaitLoaded(t, applied.Version)
	f.awaitTaken(t, applied.From.Add(eraSpan))
	return applied
}

// overridePlan puts the first key on a plan for a while, of which until tells the end. It returns the eras of that key.
func (f *fleet) overridePlan(t *testing.T, l law, pro rules.Rule, until *time.Time) law {
	t.Helper()
	onPlan := pro
	onPlan.Plan = "pro"
	_, err := f.store.Put(t.Context(), edit, onPlan)
	require.NoError(t, err)
	*until = time.Now().Add(3*eraLead + eraSpan) // by about what the database's clock says
	applied, err := f.store.Override(t.Context(), edit, rules.Override{
		Limit: "api", Key: ruledKeys[0], OnPlan: "pro", OnChange: ratelimit.ScaleTokens, Until: *until,
	})
	require.NoError(t, err)
	f.awaitLoaded(t, applied.Version)
	f.awaitTaken(t, applied.From.Add(eraSpan))
	pro.OnChange = ratelimit.ScaleTokens
	back := l[len(l)-1].rule
	return append(l, fromRule("a plan", pro, applied), fromRule("its end", back, rules.Applied{Version: applied.Version, From: *until}))
}

// report logs when the processes have loaded the changes.
func (f *fleet) report(t *testing.T, l law) {
	t.Helper()
	for i, p := range f.processes {
		for _, e := range l[1:] {
			load, _ := p.loaded(e.version)
			t.Logf("process %d loaded %q %v before it began, and told that it was %v late", i, e.name,
				time.UnixMicro(e.from).Sub(load.at), time.Duration(load.lateUs)*time.Microsecond)
		}
	}
}
