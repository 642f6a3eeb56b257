package client_test

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	century = 36525 * ratelimit.Day
	longest = 250 * 365 * ratelimit.Day // the longest RetryAfter
)

// question is a question about one state, for Go and the browser.
type question struct {
	State       int     `json:"state"` // its number
	At          int64   `json:"at"`    // microseconds since 1970
	Cost        float64 `json:"cost"`
	MaxReserved float64 `json:"maxReserved"` // of the limit's policy, 0 for no bound

	value ratelimit.Value
	told  int64 // until when the state tells the windows of a calendar; 0: there is none
}

// answer is an answer of both.
type answer struct {
	OK         bool    `json:"ok"`
	Tokens     float64 `json:"tokens"`
	Remaining  float64 `json:"remaining"`
	RetryAfter int64   `json:"retryAfterUs"`
	ResetAfter int64   `json:"resetAfterUs"`
}

// outcome is the state after a Take or a Reserve, and the answer.
type outcome struct {
	State   map[string]any `json:"state"`
	Answer  answer         `json:"answer"`
	ReadyAt int64          `json:"readyAtUs"`
}

// reply has all answers to a question.
type reply struct {
	answer

	Error    string   `json:"error"`
	Taken    *outcome `json:"taken"`
	Reserved *outcome `json:"reserved"`
}

// isTold reports whether all of the reply is within the windows that the state tells. Behind these the browser
// estimates, and the core goes on by the calendar.
func (q *question) isTold(r reply) bool {
	last := q.At + max(r.RetryAfter, r.ResetAfter)
	for _, o := range []*outcome{r.Taken, r.Reserved} {
		if o != nil {
			last = max(last, q.At+max(o.Answer.RetryAfter, o.Answer.ResetAfter), o.ReadyAt)
		}
	}
	return q.told == 0 || last < q.told
}

// toldUntil returns until when a state tells the windows of its calendar, and 0 if it has none.
func toldUntil(state map[string]any) int64 {
	windows, _ := state["windows"].([]any)
	if len(windows) < 2 {
		return 0
	}
	return int64(windows[len(windows)-2].(map[string]any)["until_us"].(float64))
}

// TestVectors asks the module in a browser, and the core, what random states of random limits mean, at random
// and at telling instants. All must agree to the last bit.
func TestVectors(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "starts a browser")
	d, pool, now := &draw{rand.New(rand.NewPCG(20260302, 1))}, postgrestest.New(t), int64(0)
	limiter, err := ratelimit.New(pool, ratelimit.Config{AsOf: func() time.Time { return time.UnixMicro(now) }})
	require.NoError(t, err)
	var states []map[string]any
	var questions []question
	for i := range 1024 {
		now = d.now()
		limit := d.limit(fmt.Sprint("limit", i))
		if r := d.row(limit, now); d.IntN(8) > 0 {
			_, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.buckets (name, key, shard, value, ts, capacity, taken, leased)
				VALUES ($1, 'alice', 0, $2, $3, $4, $5, $6)`, limit.Name(), r.value, r.ts, limit.Capacity(), r.taken, r.leased)
			require.NoError(t, err)
			for i, lease := range r.leases {
				_, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.leases VALUES ($1, 'alice', $2, $3, $4)`, limit.Name(), r.ts-int64(i), lease[0], lease[1])
				require.NoError(t, err)
			}
		}
		value, err := limiter.Value(t.Context(), limit.For("alice"))
		require.NoError(t, err)
		states = append(states, stateOf(t, value))
		questions = append(questions, d.questions(value, i, toldUntil(states[i]))...)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /questions", func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(map[string]any{"states": states, "questions": questions})
	})

	got := play[[]reply](t, newSite(t, mux).browser, `
		const { evaluate, take, reserve } = await import('/ratelimit.js');
		const bounds = new Map([[0, undefined], [`+fmt.Sprint(ratelimit.None)+`, 0]]);
		const unless = (call) => { // it can never be
			try { return call(); } catch (e) {
				if (e.name !== 'RangeError') throw e;
			}
		};
		const { states, questions } = await (await fetch('/questions')).json();
		return questions.map((q) => {
			const state = states[q.state];
			const reserved = unless(() => {
				const most = bounds.has(q.maxReserved) ? bounds.get(q.maxReserved) : q.maxReserved;
				const { state: next, answer } = reserve(state, q.at, q.cost, most);
				return { state: next, answer, readyAtUs: answer.readyAtUs };
			});
			try {
				return { ...evaluate(state, q.at, q.cost), taken: unless(() => take(state, q.at, q.cost)), reserved };
			} catch (e) { return { error: e.name, reserved }; }
		});`)
	require.Len(t, got, len(questions))
	counts := make(map[string]int) // by the kind of limit, and whether the cost was there
	for i, q := range questions {
		want := q.answers(t)
		if !q.isTold(want) {
			continue
		}
		requireSame(t, want.Taken, got[i].Taken, q)
		requireSame(t, want.Reserved, got[i].Reserved, q)
		require.Equal(t, want.answer, got[i].answer, "%+v", q)
		require.Equal(t, want.Error, got[i].Error, "%+v", q)
		counts[fmt.Sprintf("%T %t", q.value.Limit.Policy(), want.OK)]++
	}
	for _, policy := range []string{"TokenBucket", "FixedWindow", "CalendarWindow", "SlidingWindow", "Concurrency"} {
		require.Greater(t, counts["ratelimit."+policy+" true"], len(got)/50, policy)
		require.Greater(t, counts["ratelimit."+policy+" false"], len(got)/200, policy)
	}
}

// requireSame requires the same outcome, except of a cost that can never be: the browser returns none.
func requireSame(t *testing.T, want, got *outcome, q question) {
	t.Helper()
	if want != nil && got == nil {
		require.False(t, want.Answer.OK, "%+v", q)
		require.Equal(t, longest.Microseconds(), want.Answer.RetryAfter, "%+v", q)
		return
	}
	if want != nil && q.told != 0 { // the core returns more windows of a calendar the later the call
		delete(want.State, "windows")
		delete(got.State, "windows")
	}
	require.Equal(t, want, got, "%+v", q)
}

// answers asks the core.
func (q *question) answers(t *testing.T) reply {
	t.Helper()
	at := time.UnixMicro(q.At)
	after, r := q.value.Reserve(at, q.Cost)
	reserved := outcomeOf(t, after, r.Decision)
	if r.Allowed {
		reserved.ReadyAt = r.ReadyAt.UnixMicro()
	}
	wait, err := q.value.RetryAfter(at, q.Cost)
	if err != nil {
		return reply{Error: "RangeError", Reserved: reserved}
	}
	full, err := q.value.RetryAfter(at, q.value.Limit.Capacity())
	require.NoError(t, err)
	tokens := q.value.At(at)
	after, d := q.value.Take(at, q.Cost)
	return reply{
		answer: answer{
			OK: wait == 0, Tokens: tokens, Remaining: max(tokens, 0), RetryAfter: wait.Microseconds(), ResetAfter: full.Microseconds(),
		},
		Taken: outcomeOf(t, after, d), Reserved: reserved,
	}
}

func outcomeOf(t *testing.T, after ratelimit.Value, d ratelimit.Decision) *outcome {
	t.Helper()
	return &outcome{State: stateOf(t, after), Answer: answer{
		OK: d.Allowed, Tokens: after.Tokens, Remaining: d.Remaining, RetryAfter: d.RetryAfter.Microseconds(), ResetAfter: d.ResetAfter.Microseconds(),
	}}
}

// stateOf returns the state that NewClientState answers with.
func stateOf(t *testing.T, value ratelimit.Value) (state map[string]any) {
	t.Helper()
	text, err := json.Marshal(value)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &state))
	return state
}

// draw draws what the vectors are made of.
type draw struct{ *rand.Rand }

func (d *draw) between(low, high float64) float64 { return low * math.Pow(high/low, d.Float64()) }

// span returns up to limit microseconds, evenly over the orders of magnitude.
func (d *draw) span(limit int64) int64 { return int64(d.between(1, float64(limit))) }

func one[T any](d *draw, of ...T) T { return of[d.IntN(len(of))] }

// now returns when a page is read: mostly these years.
func (d *draw) now() int64 {
	return one(d, 1_772_409_600_000_000, 1_772_409_600_000_000+d.span(1e15), d.Int64N(1<<52), 1_772_409_600_000_000-d.span(1e15))
}

// row is what the table holds.
type row struct {
	limit  ratelimit.Limit
	value  float64
	ts     int64
	taken  []float64
	leased []int64
	leases [][2]int64 // their ends and slots
}

// row returns what a used limit keeps.
func (d *draw) row(limit ratelimit.Limit, now int64) row {
	capacity := limit.Capacity()
	value := one(d, 0, capacity, capacity*d.Float64(), -capacity*d.Float64(), math.Nextafter(capacity, 0), 5e-324,
		-d.between(1e-9, 1e12), -d.between(1, 1e300), d.between(1e-9, 1e12), math.Trunc(capacity*d.Float64()))
	ts := one(d, now, now-1, now+1, now-d.span(1e15), now-d.span(1e9), now+d.span(1e9), now+d.span(1e15), 0)
	return d.parts(row{limit: limit, value: value, ts: max(ts, 0)})
}

// parts returns the row with what its kind keeps besides, unless another kind has written it.
func (d *draw) parts(r row) row {
	if d.IntN(8) == 0 {
		return r
	}
	switch p := r.limit.Policy().(type) {
	case ratelimit.SlidingWindow:
		counted := make([]float64, 1+d.IntN(p.Slices+1)+one(d, 0, d.IntN(44))) // with some that have fallen out
		for i := range counted {
			counted[i] = one(d, 0, 0, p.Rate*d.Float64()*2/float64(len(counted)), math.Trunc(p.Rate/float64(len(counted))), 1)
		}
		totals := slices.Concat(counted, []float64{one(d, 0, 0, p.Rate*1000*d.Float64())})
		for i := len(counted) - 1; i >= 0; i-- {
			totals[i] += totals[i+1]
		}
		r.value = p.Rate - (totals[0] - totals[min(p.Slices+1, len(totals)-1)])
		r.taken = append([]float64{float64(p.Period.Microseconds() / int64(p.Slices)), r.value}, totals...)
	case ratelimit.Concurrency:
		r.leased, r.value = []int64{r.ts}, float64(p.Slots)
		for range d.IntN(min(p.Slots, 20) + 1) {
			slots := int64(1 + d.IntN(3)*d.IntN(3))
			end := r.ts + one(d, p.Lease.Microseconds(), d.span(p.Lease.Microseconds()), -d.span(1e9), d.span(1e9))
			r.leases, r.value = append(r.leases, [2]int64{max(end, 0), slots}), r.value-float64(slots)
		}
	}
	return r
}

// limit returns a limit as programs have them, or any that is valid.
func (d *draw) limit(name string) ratelimit.Limit {
	for {
		rate := one(d, 1, 3, 5, 9, 10, 60, 100, 1000, 40_000, 0.1, 1.0/3, 2.5)
		period := one(d, time.Microsecond, time.Millisecond, 16_667*time.Microsecond, time.Second, 7*time.Second, time.Minute,
			time.Hour, ratelimit.Day, ratelimit.Week)
		capacity := one(d, 0, 0, rate/3, 2*rate, 7*rate, 3, ratelimit.None)
		if d.IntN(3) == 0 {
			rate, period = d.between(1e-9, 1e12), time.Duration(d.span(century.Microseconds()))*time.Microsecond
			capacity = one(d, 0, d.between(1e-9, 1e12))
		}
		maxDebt := one(d, 0, 0, ratelimit.None, rate/3, 3, capacity, d.between(1e-9, 1e12))
		var policy ratelimit.Policy = ratelimit.TokenBucket{Rate: rate, Period: period, Capacity: capacity, MaxReserved: maxDebt}
		if d.IntN(2) == 0 {
			start := one(d, time.Time{}, time.UnixMicro(d.Int64N(1<<53)), time.UnixMicro(-d.Int64N(1<<53)), time.UnixMicro(0))
			policy = ratelimit.FixedWindow{Rate: rate, Period: period, Capacity: capacity, MaxReserved: maxDebt, Start: start}
		}
		switch d.IntN(6) {
		case 2:
			policy = ratelimit.CalendarWindow{
				Rate: rate, Resets: one(d, ratelimit.Daily, ratelimit.Weekly, ratelimit.Monthly, ratelimit.Quarterly, ratelimit.Yearly),
				Zone: one(d, "Europe/Berlin", "UTC", "America/New_York", "Pacific/Kiritimati"), MaxReserved: one(d, 0, ratelimit.None, rate/3),
			}
		case 0:
			n := 1 + d.IntN(128)
			policy = ratelimit.SlidingWindow{Rate: rate, Period: period / time.Duration(n) / time.Microsecond * time.Microsecond * time.Duration(n), Slices: n}
		case 1:
			policy = ratelimit.Concurrency{Slots: 1 + d.IntN(1000), Lease: one(d, time.Second, time.Minute, time.Duration(d.span(3600e6))*time.Microsecond)}
		}
		if limit, err := ratelimit.NewLimit(name, policy); err == nil {
			return limit
		}
	}
}

// questions returns what to ask of a value: at random instants, and where the answer turns.
func (d *draw) questions(value ratelimit.Value, state int, told int64) (questions []question) {
	now, capacity := value.AsOf.UnixMicro(), value.Limit.Capacity()
	costs := []float64{
		0, capacity, capacity * d.Float64(), math.Nextafter(capacity, 0), capacity * 0x1p-40, capacity * 0x1p-41,
		math.Nextafter(capacity, math.Inf(1)), 1, 1e-9, -1,
	}
	var maxDebt float64
	_, calendar := value.Limit.Policy().(ratelimit.CalendarWindow)
	switch policy := value.Limit.Policy().(type) {
	case ratelimit.TokenBucket:
		maxDebt = policy.MaxReserved
	case ratelimit.FixedWindow:
		maxDebt = policy.MaxReserved
	case ratelimit.CalendarWindow:
		maxDebt = policy.MaxReserved
	}
	if most := capacity + maxDebt; maxDebt > 0 {
		costs = append(costs, most, math.Nextafter(most, math.Inf(1)), math.Nextafter(most, 0), most*d.Float64(), most*d.Float64(), maxDebt)
	}
	ats := []int64{now, now + 1, now - 1, now + d.span(1e6), now + d.span(1e15), now - d.span(1e15), 0, d.Int64N(1 << 52)}
	for range 6 {
		cost, at := one(d, costs...), min(max(one(d, ats...), 0), 1<<52)
		if calendar { // of windows that are over it is not told how long they were
			at = min(max(at, now), told-1)
		}
		ask := func(at int64) { questions = append(questions, question{state, at, cost, maxDebt, value, told}) }
		ask(at)
		wait, _ := value.RetryAfter(time.UnixMicro(at), cost)
		_, reserved := value.Reserve(time.UnixMicro(at), cost)
		for _, wait := range []time.Duration{wait, reserved.RetryAfter} {
			if turn := at + wait.Microseconds(); wait > 0 && turn < 1<<52 {
				ask(turn - 1)
				ask(turn)
			}
		}
	}
	return questions
}
