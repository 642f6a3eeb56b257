package playground_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// history is what the page's simulation says.
type history struct {
	Name  string `json:"name"`
	Lanes []lane `json:"lanes"`
}

type lane struct {
	ID    string `json:"id"`
	Start struct {
		Kind     string  `json:"kind"`
		Rate     float64 `json:"rate"`
		Period   int64   `json:"period_us"`
		Capacity float64 `json:"capacity"`
		Slices   int     `json:"slices"`
		Lease    int64   `json:"lease_us"`
	} `json:"start"`
	First       json.RawMessage `json:"first"`
	MaxReserved *float64        `json:"maxReserved"` // nil for no bound
	Events      []event         `json:"events"`
}

type event struct {
	At         int64           `json:"at"`
	Cost       float64         `json:"cost"`
	Verb       string          `json:"verb"`
	OK         bool            `json:"ok"`
	Never      bool            `json:"never"`
	Tokens     float64         `json:"tokens"`
	RetryAfter *int64          `json:"retryAfterUs"`
	ReadyAt    *int64          `json:"readyAtUs"`
	State      json.RawMessage `json:"state"`
}

// TestHistoriesAreThoseOfGo plays the whole history of each preset, and of loads of every kind, in the page and in Go.
// Every instant, cost, decision, number of tokens and wait is the same to the last bit.
func TestHistoriesAreThoseOfGo(t *testing.T) {
	t.Parallel()
	p := open(t, serve(t))
	ids := presetIDs(t, p)
	histories := play[[]history](t, p, `
		const { PRESETS } = await import('./presets.js');
		const { DEFAULTS } = await import('./settings.js');
		const { simulate } = await import('./simulate.js');
		const all = PRESETS.map((preset) => [preset.id, preset.settings, preset.script]);
		for (const pattern of ['even', 'bursty', 'poisson']) {
			for (const [verb, leaky, third] of [['take', 'queue', 'leaky'], ['reserve', 'meter', 'leaky'], ['take', 'meter', 'sliding'], ['reserve', 'meter', 'slots']]) {
				for (const [cost, maxReserved] of [[1, 7], [2.5, 0], [0.37, null], [11.5, 1]]) {
					const settings = { ...DEFAULTS, rate: 7, period: 3, pattern, verb, leaky, third, cost, maxReserved, span: 30 };
					all.push([JSON.stringify(settings), settings]);
				}
			}
		}
		return all.map(([name, settings, script]) => ({
			name, lanes: simulate(settings, script).lanes.map((lane) => ({
				...lane, first: lane.start, maxReserved: lane.maxReserved === Infinity ? null : lane.maxReserved,
			})),
		}));`)
	require.Len(t, histories, len(ids)+48)
	counts := make(map[string]int)
	for _, h := range histories {
		require.Len(t, h.Lanes, 3)
		for _, l := range h.Lanes {
			require.NotEmpty(t, l.Events, h.Name)
			replay(t, h.Name, l, counts)
		}
	}
	t.Logf("%d histories agree: %v", len(histories), counts)
	for _, kind := range []string{"take admitted", "take refused", "take never", "reserve admitted", "reserve delayed", "reserve refused", "reserve never"} {
		require.Greater(t, counts[kind], 50, kind)
	}
	for _, id := range []string{"token", "window", "leaky", "sliding", "slots"} {
		require.Greater(t, counts[id+" admitted"], 100, id)
		require.Greater(t, counts[id+" refused"], 100, id)
	}
}

// limit returns the limit of a lane.
func (l lane) limit(t *testing.T) ratelimit.Limit {
	t.Helper()
	capacity, maxOwed := l.Start.Capacity, 0.0
	if capacity == 0 {
		capacity = ratelimit.None
	}
	if l.MaxReserved != nil {
		maxOwed = *l.MaxReserved
		if maxOwed == 0 {
			maxOwed = ratelimit.None
		}
	}
	period := time.Duration(l.Start.Period) * time.Microsecond
	var policy ratelimit.Policy = ratelimit.TokenBucket{Rate: l.Start.Rate, Period: period, Capacity: capacity, MaxReserved: maxOwed}
	switch l.Start.Kind {
	case "fixed window":
		policy = ratelimit.FixedWindow{Rate: l.Start.Rate, Period: period, Capacity: capacity, MaxReserved: maxOwed, Start: time.UnixMicro(0)}
	case "sliding window":
		policy = ratelimit.SlidingWindow{Rate: l.Start.Rate, Period: period, Slices: l.Start.Slices}
	case "concurrency":
		policy = ratelimit.Concurrency{Most: int(l.Start.Capacity), Lease: time.Duration(l.Start.Lease) * time.Microsecond}
	}
	limit, err := ratelimit.NewLimit(l.ID, policy)
	require.NoError(t, err)
	return limit
}

// replay has Go decide on a lane's requests.
func replay(t *testing.T, name string, l lane, counts map[string]int) {
	t.Helper()
	value := l.limit(t).Global().Full(time.UnixMicro(0))
	same(t, value, l.First)
	for _, got := range l.Events {
		var want ratelimit.Reservation
		if got.Verb == "reserve" {
			value, want = value.Reserve(time.UnixMicro(got.At), got.Cost)
		} else {
			value, want.Decision = value.Take(time.UnixMicro(got.At), got.Cost)
			want.ReadyAt = want.At
		}
		same(t, value, got.State)
		expected := event{At: got.At, Cost: got.Cost, Verb: got.Verb, State: got.State, OK: want.Allowed, Tokens: value.Tokens}
		kind := "admitted"
		retryAfter, readyAt := want.RetryAfter.Microseconds(), want.ReadyAt.UnixMicro()
		switch {
		case want.RetryAfter == 250*365*ratelimit.Day:
			kind, expected.Never = "never", true
		case !want.Allowed:
			kind, expected.RetryAfter = "refused", &retryAfter
		default:
			if readyAt > got.At {
				kind = "delayed"
			}
			expected.RetryAfter, expected.ReadyAt = &retryAfter, &readyAt
		}
		require.Equal(t, expected, got, "%s, %s", name, l.ID)
		counts[got.Verb+" "+kind]++
		counts[l.ID+" "+kind]++
	}
}

// same requires the page's state to equal the value's.
func same(t *testing.T, value ratelimit.Value, state json.RawMessage) {
	t.Helper()
	text, err := json.Marshal(value)
	require.NoError(t, err)
	require.JSONEq(t, string(text), string(state))
}
