package processes_test

import (
	"cmp"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// lawEra is a policy, the instant from which it has to hold, and the version of the rules that says so.
type lawEra struct {
	name    string
	from    int64
	version int64
	rule    rules.Rule
}

// law is the expected policies of a key: eras in the order of their beginnings. It shares no code with the package under test.
type law []lawEra

// lawTokens is the range of tokens that a bucket may hold. The bounds differ only if the bucket may have been full, because an
// unknown number of arriving tokens is lost then.
type lawTokens struct{ least, most float64 }

// holding returns which of the eras holds at an instant.
func (l law) holding(at int64) int {
	i := len(l) - 1
	for i > 0 && l[i].from > at {
		i--
	}
	return i
}

// end returns when the i-th era ends, or last.
func (l law) end(i int, last int64) int64 {
	if i+1 < len(l) {
		return l[i+1].from
	}
	return last
}

// window returns the policy of the era as a window. A token bucket's has no Start.
func (e *lawEra) window() ratelimit.FixedWindow {
	if p, ok := e.rule.Policy.(ratelimit.TokenBucket); ok {
		return ratelimit.FixedWindow{Rate: p.Rate, Period: p.Period, Capacity: p.Capacity}
	}
	return e.rule.Policy.(ratelimit.FixedWindow)
}

func (e *lawEra) capacity() float64 { return cmp.Or(e.window().Capacity, e.window().Rate) }

// policy returns the name of the era's policy in a decision.
func (e *lawEra) policy() string { return e.rule.Policy.String() }

// arrived returns the tokens that arrive after an instant and up to another, both in the era.
func (e *lawEra) arrived(after, upTo int64) float64 {
	w := e.window()
	if w.Start.IsZero() {
		return w.Rate * float64(upTo-after) / float64(w.Period.Microseconds())
	}
	begun := func(at int64) int64 {
		return (at - w.Start.UnixMicro()) / w.Period.Microseconds()
	}
	return w.Rate * float64(begun(upTo)-begun(after))
}

// enter returns what the tokens of the era before become at the beginning of the era.
func (e *lawEra) enter(tokens float64, before *lawEra) float64 {
	if tokens >= before.capacity() {
		return e.capacity()
	}
	if e.rule.OnChange == ratelimit.ScaleTokens {
		tokens *= e.capacity() / before.capacity()
	}
	return min(tokens, e.capacity())
}

// lateness counts decisions in an era by an earlier policy, in processes that had not learned of the change.
type lateness struct {
	decisions int
	us        int64 // how long after the beginning of the era the last of them was decided
}

// lateIn checks that every process that knew the era decided under its policy. It returns, by era, the decisions under an earlier
// policy by the other processes.
func (l law) lateIn(t *testing.T, key string, decisions []taken) map[int]lateness {
	t.Helper()
	late := make(map[int]lateness)
	for _, d := range decisions {
		i := l.holding(d.at)
		if d.key != key || d.policy == l[i].policy() {
			continue
		}
		require.Less(t, d.version, l[i].version, "%s: %v from its beginning the policy of %q was known, and %q decided",
			key, time.Duration(d.at-l[i].from)*time.Microsecond, l[i].name, d.policy)
		require.True(t, l.wasBefore(i, d.policy), "%s: %q decided in the era of %q, and was none before it", key, d.policy, l[i].name)
		late[i] = lateness{late[i].decisions + 1, max(late[i].us, d.at-l[i].from)}
	}
	return late
}

func (l law) wasBefore(i int, policy string) bool {
	for j := range i {
		if l[j].policy() == policy {
			return true
		}
	}
	return false
}

// row is a stored bucket of the limit.
type row struct {
	Key   string
	Value float64
	TS    int64 // microseconds since 1970
}

// rowOf returns the bucket of a key.
func rowOf(t *testing.T, w *world.World, key string) (r row) {
	t.Helper()
	require.NoError(t, w.Pool.QueryRow(t.Context(), `SELECT key, value, ts FROM ratelimit.buckets WHERE name = 'api' AND key = $1`, key).Scan(&r.Key, &r.Value, &r.TS))
	return r
}

// requireKept checks that each era admitted at most the tokens that its bucket can have held, from its first instant on, and that
// in the end the row has the expected value.
func (l law) requireKept(t *testing.T, decisions []taken, end row, began float64) {
	t.Helper()
	late := l.lateIn(t, end.Key, decisions)
	admitted := make([]float64, len(l))
	for _, d := range decisions {
		if d.key == end.Key && d.allowed {
			admitted[l.holding(d.at)] += d.cost
		}
	}
	const rounding = 1e-6
	holds := lawTokens{began, began}
	for i := range l {
		e := &l[i]
		if i > 0 {
			holds = lawTokens{e.enter(holds.least, &l[i-1]), e.enter(holds.most, &l[i-1])}
			holds = holds.widened(&l[i-1], e.from, late[i])
		}
		arrived := e.arrived(e.from, l.end(i, end.TS))
		t.Logf("%s, %-16s %-28s began with %7.2f, %7.2f arrived, %7.2f admitted, %d late in %v", end.Key, e.name+":", e.policy(), holds.most, arrived,
			admitted[i], late[i].decisions, time.Duration(late[i].us)*time.Microsecond)
		require.LessOrEqual(t, admitted[i], max(holds.most+arrived, 0)+rounding, "%s: %q admitted more than there was", end.Key, e.name)
		holds = holds.after(e, arrived, admitted[i])
	}
	require.InDelta(t, (holds.least+holds.most)/2, end.Value, (holds.most-holds.least)/2+rounding, "%s: what is left", end.Key)
}

// after returns the range after tokens have arrived and been admitted.
func (h lawTokens) after(e *lawEra, arrived, admitted float64) lawTokens {
	if admitted == 0 {
		return lawTokens{min(h.least+arrived, e.capacity()), min(h.most+arrived, e.capacity())}
	}
	lost := max(h.most+arrived-e.capacity(), 0)
	return lawTokens{max(h.least+arrived-admitted-lost, 0), min(h.most+arrived-admitted, e.capacity())}
}

// widened returns the range if a process continues under the era before for a while. It admits up to that era's capacity and rate
// more, or loses the tokens above that capacity.
func (h lawTokens) widened(before *lawEra, from int64, late lateness) lawTokens {
	if late.decisions == 0 {
		return h
	}
	return lawTokens{math.Inf(-1), h.most + before.capacity() + math.Ceil(before.arrived(from, from+late.us))}
}

// fromRule returns the era that a change has made.
func fromRule(name string, rule rules.Rule, applied rules.Applied) lawEra {
	return lawEra{name: name, from: applied.From.UnixMicro(), version: applied.Version, rule: rule}
}
