package refusals

import (
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// noon is the beginning of some minute.
var noon = time.Date(2026, time.March, 9, 12, 0, 0, 0, time.UTC)

func minuteAt(at time.Time, places int) *minute { return newMinute(at.UnixMicro(), at, places) }

// For any order of counting and collecting, sums over the rows of a limit and route are exact after each collection. No
// key has more refusals than it had.
func TestTheRowsOfAMinuteAddUp(t *testing.T) {
	t.Parallel()
	r := testkit.Rand(t)
	for range 100 {
		m := minuteAt(noon, r.IntN(5))
		exact, exactKeys := make(map[pair]tally), make(map[id]tally)
		table := make(map[id]tally)
		flush := func(done bool) {
			for of, row := range m.collect(done) {
				add(table, of, row)
			}
			sums := make(map[pair]tally)
			for of, row := range table {
				sum := sums[of.pair]
				require.Contains(t, []string{"", of.limit}, row.rule, "what a key has without a plan")
				row.rule = ""
				sum.add(row)
				sums[of.pair] = sum
				require.GreaterOrEqual(t, row.refused, int64(0), of)
				if of.key != "" {
					require.LessOrEqual(t, row.refused, exactKeys[of].refused, of)
					require.LessOrEqual(t, row.cost, exactKeys[of].cost, of)
					require.LessOrEqual(t, row.lastUs, exactKeys[of].lastUs, of)
				}
			}
			require.Equal(t, exact, sums)
		}
		for i := range r.IntN(301) {
			refusal := ratelimit.Refusal{
				Limit: []string{"logins", "uploads"}[r.IntN(2)],
				Route: []string{"", "POST /"}[r.IntN(2)],
				Key:   fmt.Sprint(r.IntN([]int{4, 201}[r.IntN(2)])), Shadow: r.IntN(2) == 0,
				Cost: float64(r.IntN(6)), At: noon.Add(time.Duration(i) * time.Millisecond),
			}
			if refusal.Key == "0" {
				refusal.Key = "" // Global
			}
			m.count(&refusal)
			of := id{pair{refusal.Limit, refusal.Route, refusal.Shadow}, refusal.Key}
			one := tally{refused: 1, cost: refusal.Cost, lastUs: refusal.At.UnixMicro()}
			sum := exact[of.pair]
			sum.add(one)
			exact[of.pair] = sum
			add(exactKeys, of, one)
			if r.IntN(31) == 0 {
				flush(r.IntN(6) == 0)
			}
		}
		flush(true)
	}
}

func TestHeaviestKeysGetRows(t *testing.T) {
	t.Parallel()
	refuse := func(m *minute, key string, times int) {
		for range times {
			m.count(&ratelimit.Refusal{Limit: "logins", Key: key, Cost: 2, At: noon})
		}
	}
	row := func(key string) id { return id{pair{limit: "logins"}, key} }
	us := noon.UnixMicro()

	t.Run("WhenTheMinuteIsOver", func(t *testing.T) {
		t.Parallel()
		m := minuteAt(noon, places)
		for key := range 2 * earlyOnce {
			refuse(m, fmt.Sprint(key), key+1)
		}
		refuse(m, "mallory", 1000)
		rows := m.collect(false)
		require.Equal(t, tally{refused: 1000, cost: 2000, lastUs: us, rule: "logins"}, rows[row("mallory")], "the heaviest are told at once")
		require.Len(t, rows, earlyOnce+1)
		require.Positive(t, rows[row("")].refused)
		rows = m.collect(true)
		require.Negative(t, rows[row("")].refused)
		require.Len(t, rows, earlyOnce+2)
		require.NotContains(t, rows, row("mallory"))
		require.Empty(t, m.collect(true))
	})

	t.Run("NotWithoutConfigKeys", func(t *testing.T) {
		t.Parallel()
		m := minuteAt(noon, 0)
		refuse(m, "mallory", 3)
		require.Equal(t, map[id]tally{row(""): {refused: 3, cost: 6, lastUs: us}}, m.collect(true))
	})

	t.Run("AtMostTenThousandRows", func(t *testing.T) {
		t.Parallel()
		m, told := minuteAt(noon, places), make(map[id]tally)
		for round := range 10 { // each with keys of its own, of which some are heavy
			for key := range 3000 {
				refuse(m, fmt.Sprint(round, " ", key), 1+3000/(key+1))
			}
			for of := range m.collect(round == 9) {
				told[of] = tally{}
			}
		}
		require.Greater(t, len(told), maxKeys*9/10)
		require.LessOrEqual(t, len(told), maxKeys+1)
	})

	t.Run("OnlyAFewEarlyRows", func(t *testing.T) {
		t.Parallel()
		const rounds = 8
		m, told := minuteAt(noon, earlyOnce), make(map[id]tally)
		m.early = 3*earlyOnce + 1
		times := 1
		for round := range rounds { // in each, keys that are heavier by far take all places
			for key := range earlyOnce {
				refuse(m, fmt.Sprint(round, " ", key), times)
			}
			for of := range m.collect(round == rounds-1) {
				told[of] = tally{}
			}
			times *= 3
		}
		require.Len(t, told, 3*earlyOnce+1+earlyOnce+1)
	})

	t.Run("NoRowIsMovedThatMayNotHaveBeenWritten", func(t *testing.T) {
		t.Parallel()
		m := minuteAt(noon, places)
		for key := range 2 * earlyOnce {
			refuse(m, fmt.Sprint(key), 1)
		}
		m.collect(false)
		m.forget()
		require.Empty(t, m.collect(true), "nothing is moved that may not be there")
	})
}

// A key may be a part of a request's memory, which is not to stay for it.
func TestNothingOfTheCallersMemoryIsKept(t *testing.T) {
	t.Parallel()
	m := minuteAt(noon, 1)
	r := ratelimit.Refusal{Limit: strings.Clone("logins"), Route: strings.Clone("POST /login"), Key: strings.Clone("mallory"), At: noon}
	m.count(&r)
	for of := range m.collect(true) {
		require.NotSame(t, unsafe.StringData(r.Limit), unsafe.StringData(of.limit))
		require.NotSame(t, unsafe.StringData(r.Route), unsafe.StringData(of.route))
		require.NotSame(t, unsafe.StringData(r.Key), unsafe.StringData(of.key))
	}
}

// The number of names is bounded, and any text from clients can be stored.
func TestNamesAreBounded(t *testing.T) {
	t.Parallel()
	m := minuteAt(noon, places)
	n := int64(0)
	for limit := range 40 {
		for route := range 200 {
			for _, shadow := range []bool{true, false} {
				m.count(&ratelimit.Refusal{Limit: fmt.Sprint("limit", limit), Route: fmt.Sprint("/", route), Shadow: shadow, At: noon})
				n++
			}
		}
	}
	long := strings.Repeat("é", 300)
	for _, text := range []string{"", "\xff", "a\x00b", long, "é" + long} {
		m.count(&ratelimit.Refusal{Limit: text, Route: text, Key: text, At: noon})
		n++
	}
	rows := m.collect(true)
	require.Equal(t, n, refusedIn(rows))
	for of := range rows {
		require.NotEmpty(t, of.limit)
		require.LessOrEqual(t, len(of.limit), maxNameBytes)
		require.LessOrEqual(t, len(of.route), maxRouteBytes)
		require.LessOrEqual(t, len(of.key), maxKeyBytes)
		for _, text := range []string{of.limit, of.route, of.key} {
			require.True(t, utf8.ValidString(text))
			require.NotContains(t, text, "\x00")
		}
	}
	pairs := make(map[pair]bool)
	for of := range rows {
		pairs[of.pair] = true
	}
	require.LessOrEqual(t, len(pairs), maxPairs)
	require.Contains(t, pairs, pair{limit: "limit0", route: "/0"})
	require.Contains(t, pairs, pair{limit: "limit7", route: other})
	require.Contains(t, pairs, pair{limit: "limit39", route: other})

	crowd := minuteAt(noon, places)
	for limit := range 3000 {
		crowd.count(&ratelimit.Refusal{Limit: fmt.Sprint("limit", limit), At: noon})
	}
	rows = crowd.collect(true)
	require.Len(t, rows, maxPairs-1) // the last one is for shadows
	require.EqualValues(t, 3000-(maxPairs-otherLimits), rows[id{pair: pair{limit: other, route: other}}].refused)
}

// requireBounds checks what space-saving promises of counts, by the exact ones.
func (h *heaviest) requireBounds(t require.TestingT, exact map[string]int64) {
	var n, sum int64
	for _, count := range exact {
		n += count
	}
	require.LessOrEqual(t, len(h.order), h.places)
	require.Len(t, h.of, len(h.order))
	for i, r := range h.order {
		sum += r.count
		truth := exact[r.id.key]
		require.Equal(t, i, r.rank)
		require.Same(t, r.place, h.of[r.id])
		require.GreaterOrEqual(t, r.count, truth, r.id.key)
		require.LessOrEqual(t, r.count-r.over, truth, r.id.key)
		require.LessOrEqual(t, r.over*int64(h.places), n, r.id.key)
		if len(exact) <= h.places {
			require.Zero(t, r.over, "each key has a place")
		}
		if i > 0 {
			require.LessOrEqual(t, r.count, h.order[i-1].count, "the order is by count")
		}
	}
	require.Equal(t, n, sum)
	for key, truth := range exact {
		if truth*int64(h.places) > n {
			require.Contains(t, h.of, id{key: key}, "%d of %d", truth, n)
		}
	}
}

func TestHeaviestKeepsItsBounds(t *testing.T) {
	t.Parallel()
	r := testkit.Rand(t)
	for range 100 {
		h, exact := newHeaviest(1+r.IntN(12)), make(map[string]int64)
		for i := range r.IntN(400) {
			key := fmt.Sprint(r.IntN([]int{4, 41}[r.IntN(2)])) // some are heavy
			h.raise(h.admit(id{key: key}))
			exact[key]++
			if i%50 == 0 {
				h.requireBounds(t, exact)
			}
		}
		h.requireBounds(t, exact)
	}
}
