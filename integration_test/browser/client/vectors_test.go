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

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	vectorsSeed   = 20260302
	pagesOfLimits = 16 // of 64 limits, each page read at an instant of its own
	limitsOnPage  = 64
	century       = 36525 * ratelimit.Day
	longest       = 250 * 365 * ratelimit.Day // the longest RetryAfter
)

// question is a question about one state, for Go and the browser.
type question struct {
	Page  int     `json:"page"`
	Limit string  `json:"limit"`
	At    int64   `json:"at"` // microseconds since 1970
	Cost  float64 `json:"cost"`

	MaxReserved float64 `json:"maxReserved"` // of the limit's policy, 0 for no bound
	Policy      string  `json:"-"`
	Told        int64   `json:"-"` // until when the state tells the windows of a calendar; 0: there is none
}

// isTold reports whether all of the reply is within the windows that the state tells. Behind these the browser estimates, and the
// core goes on by the calendar.
func (q *question) isTold(r reply) bool {
	if q.Told == 0 {
		return true
	}
	last := q.At + max(r.RetryAfter, r.ResetAfter)
	for _, n := range []*next{r.Next, r.Reserved} {
		if n != nil {
			last = max(last, q.At+max(n.Reply.RetryAfter, n.Reply.ResetAfter))
		}
		if n != nil && n.ReadyAt != nil {
			last = max(last, *n.ReadyAt)
		}
	}
	return last < q.Told
}

// toldUntil returns until when the state of a value tells the windows of its calendar, and 0 when it has none.
func toldUntil(value ratelimit.Value) int64 {
	text, err := json.Marshal(value)
	var state struct {
		Windows []struct {
			UntilUs int64 `json:"until_us"`
		} `json:"windows"`
	}
	if err != nil || json.Unmarshal(text, &state) != nil || len(state.Windows) < 2 {
		return 0
	}
	return state.Windows[len(state.Windows)-2].UntilUs
}

// reply is what both must say.
type reply struct {
	OK         bool    `json:"ok"`
	Tokens     float64 `json:"tokens"`
	Remaining  float64 `json:"remaining"`
	RetryAfter int64   `json:"retryAfterUs"`
	ResetAfter int64   `json:"resetAfterUs"`
	Error      string  `json:"error"`
	Next       *next   `json:"next"`
	Reserved   *next   `json:"reserved"`
}

// next is the state after taking the cost, and its answers.
type next struct {
	State   json.RawMessage `json:"state"`
	Reply   reply           `json:"answer"`
	ReadyAt *int64          `json:"readyAtUs"`
}

// TestVectors asks the module in a browser, and the core, what random states of random limits mean, at random
// and at telling instants. The states come from rows, through the handler. All must agree to the last bit.
func TestVectors(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "starts a browser")
	d := &draw{rand.New(rand.NewPCG(vectorsSeed, 1))}
	pool := postgrestest.New(t)
	mux := http.NewServeMux()
	var questions []question
	var replies []reply
	for page := range pagesOfLimits {
		now := d.now()
		limits, rows := d.limits(page, now)
		insert(t, pool, rows)
		limiter, err := ratelimit.New(pool, ratelimit.Config{AsOf: func() time.Time { return time.UnixMicro(now) }})
		require.NoError(t, err)
		mux.Handle(fmt.Sprintf("GET /limits/%d", page), newClientState(t, limiter, alice, limits...))
		for _, limit := range limits {
			value, err := limiter.Value(t.Context(), limit.For("alice"))
			require.NoError(t, err)
			asked := d.questions(page, value)
			questions = append(questions, asked...)
			for _, q := range asked {
				replies = append(replies, answer(t, value, q))
			}
		}
	}
	text, err := json.Marshal(questions)
	require.NoError(t, err)
	mux.HandleFunc("GET /questions", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(text) })

	got := play[[]reply](t, newSite(t, mux).browser, `
		const { evaluate, take, reserve } = await import('/ratelimit.js');
		const bounds = new Map([[0, undefined], [`+fmt.Sprint(ratelimit.None)+`, 0]]);
		const unless = (call) => { // it can never be
			try { return call(); } catch (e) {
				if (e.name !== 'RangeError') throw e;
			}
		};
		const reserved = (state, q) => unless(() => {
			const most = bounds.has(q.maxReserved) ? bounds.get(q.maxReserved) : q.maxReserved;
			const { state: next, answer } = reserve(state, q.at, q.cost, most);
			return { state: next, answer, readyAtUs: answer.readyAtUs };
		});
		const read = async (url) => (await fetch(url)).json();
		const pages = [];
		for (let i = 0; i < `+fmt.Sprint(pagesOfLimits)+`; i++) {
			pages.push(new Map((await read('/limits/' + i)).limits.map((s) => [s.limit, s])));
		}
		return (await read('/questions')).map((q) => {
			const state = pages[q.page].get(q.limit);
			try {
				return { ...evaluate(state, q.at, q.cost), next: unless(() => take(state, q.at, q.cost)), reserved: reserved(state, q) };
			} catch (e) { return { error: e.name, reserved: reserved(state, q) }; }
		});`)
	require.Len(t, got, len(questions))
	counts := make(map[string]int) // by the kind of limit, and whether the cost was there
	for i, q := range questions {
		if !q.isTold(replies[i]) {
			continue
		}
		replies[i].Next = unlessNever(t, replies[i].Next, got[i].Next, q)
		sameState(t, replies[i].Next, got[i].Next, q)
		replies[i].Reserved = unlessNever(t, replies[i].Reserved, got[i].Reserved, q)
		sameState(t, replies[i].Reserved, got[i].Reserved, q)
		require.Equal(t, replies[i], got[i], "%+v", q)
		counts[fmt.Sprint(q.Policy, replies[i].OK)]++
	}
	for _, policy := range []string{"TokenBucket", "FixedWindow", "CalendarWindow", "SlidingWindow", "Concurrency"} {
		require.Greater(t, counts["ratelimit."+policy+"true"], len(got)/50, policy)
		require.Greater(t, counts["ratelimit."+policy+"false"], len(got)/200, policy)
	}
}

// unlessNever returns want, and nil where got is nil, which is what can never be.
func unlessNever(t *testing.T, want, got *next, q question) *next {
	t.Helper()
	if want == nil || got != nil {
		return want
	}
	require.False(t, want.Reply.OK, "%+v", q)
	require.Equal(t, longest.Microseconds(), want.Reply.RetryAfter, "%+v", q)
	return nil
}

// sameState requires the two to be of one state, and has got write it as want does.
func sameState(t *testing.T, want, got *next, q question) {
	t.Helper()
	if want != nil && got != nil {
		require.JSONEq(t, withoutWindows(t, want.State, q), withoutWindows(t, got.State, q), "%+v", q)
		got.State = want.State
	}
}

// withoutWindows returns a state without the windows of its calendar: the core returns more of them the later the call.
func withoutWindows(t *testing.T, state json.RawMessage, q question) string {
	t.Helper()
	if q.Told == 0 {
		return string(state)
	}
	var fields map[string]any
	require.NoError(t, json.Unmarshal(state, &fields))
	delete(fields, "windows")
	text, err := json.Marshal(fields)
	require.NoError(t, err)
	return string(text)
}

// answer asks the core.
func answer(t *testing.T, value ratelimit.Value, q question) reply {
	t.Helper()
	at := time.UnixMicro(q.At)
	wait, err := value.RetryAfter(at, q.Cost)
	if err != nil {
		return reply{Error: "RangeError", Reserved: reserved(t, value, q)}
	}
	full, err := value.RetryAfter(at, value.Limit.Capacity())
	require.NoError(t, err)
	tokens := value.At(at)
	after, d := value.Take(at, q.Cost)
	return reply{
		OK: wait == 0, Tokens: tokens, Remaining: max(tokens, 0),
		RetryAfter: wait.Microseconds(), ResetAfter: full.Microseconds(), Next: nextOf(t, after, d), Reserved: reserved(t, value, q),
	}
}

// reserved has the core reserve what the question asks for.
func reserved(t *testing.T, value ratelimit.Value, q question) *next {
	t.Helper()
	after, r := value.Reserve(time.UnixMicro(q.At), q.Cost)
	n := nextOf(t, after, r.Decision)
	if r.Allowed {
		ready := r.ReadyAt.UnixMicro()
		n.ReadyAt = &ready
	}
	return n
}

func nextOf(t *testing.T, after ratelimit.Value, d ratelimit.Decision) *next {
	t.Helper()
	text, err := json.Marshal(after)
	require.NoError(t, err)
	return &next{State: text, Reply: reply{
		OK: d.Allowed, Tokens: after.Tokens, Remaining: d.Remaining,
		RetryAfter: d.RetryAfter.Microseconds(), ResetAfter: d.ResetAfter.Microseconds(),
	}}
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
	leases []int64
}

// limits returns the limits of a page, and the rows of used limits.
func (d *draw) limits(page int, now int64) ([]ratelimit.Limit, []row) {
	limits, rows := make([]ratelimit.Limit, limitsOnPage), []row(nil)
	for i := range limits {
		limits[i] = d.limit(fmt.Sprintf("limit%d/%d", page, i))
		capacity := limits[i].Capacity()
		value := one(d, 0, capacity, capacity*d.Float64(), -capacity*d.Float64(), math.Nextafter(capacity, 0), 5e-324,
			-d.between(1e-9, 1e12), -d.between(1, 1e300), d.between(1e-9, 1e12), math.Trunc(capacity*d.Float64()))
		ts := one(d, now, now-1, now+1, now-d.span(1e15), now-d.span(1e9), now+d.span(1e9), now+d.span(1e15), 0)
		if d.IntN(8) > 0 {
			rows = append(rows, d.parts(row{limit: limits[i], value: value, ts: max(ts, 0)}))
		}
	}
	return limits, rows
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
		r.leases, r.value = []int64{r.ts}, float64(p.Most)
		for i := range d.IntN(min(p.Most, 20) + 1) {
			slots := int64(1 + d.IntN(3)*d.IntN(3))
			end := r.ts + one(d, p.Lease.Microseconds(), d.span(p.Lease.Microseconds()), -d.span(1e9), d.span(1e9))
			r.leases, r.value = append(r.leases, r.ts-int64(i), max(end, 0), slots), r.value-float64(slots)
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
		maxOwed := one(d, 0, 0, ratelimit.None, rate/3, 3, capacity, d.between(1e-9, 1e12))
		var policy ratelimit.Policy = ratelimit.TokenBucket{Rate: rate, Period: period, Capacity: capacity, MaxReserved: maxOwed}
		if d.IntN(2) == 0 {
			start := one(d, time.Time{}, time.UnixMicro(d.Int64N(1<<53)), time.UnixMicro(-d.Int64N(1<<53)), time.UnixMicro(0))
			policy = ratelimit.FixedWindow{Rate: rate, Period: period, Capacity: capacity, MaxReserved: maxOwed, Start: start}
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
			policy = ratelimit.Concurrency{Most: 1 + d.IntN(1000), Lease: one(d, time.Second, time.Minute, time.Duration(d.span(3600e6))*time.Microsecond)}
		}
		if limit, err := ratelimit.NewLimit(name, policy); err == nil {
			return limit
		}
	}
}

// questions returns what to ask of a value: at random instants, and where the answer turns.
func (d *draw) questions(page int, value ratelimit.Value) []question {
	now, capacity := value.AsOf.UnixMicro(), value.Limit.Capacity()
	costs := []float64{
		0, capacity, capacity * d.Float64(), math.Nextafter(capacity, 0), capacity * 0x1p-40, capacity * 0x1p-41,
		math.Nextafter(capacity, math.Inf(1)), 1, 1e-9, -1,
	}
	maxOwed := maxReserved(value.Limit)
	if most := capacity + maxOwed; maxOwed > 0 {
		costs = append(costs, most, math.Nextafter(most, math.Inf(1)), math.Nextafter(most, 0), most*d.Float64(), most*d.Float64(), maxOwed)
	}
	name, policy := value.Limit.Name(), fmt.Sprintf("%T", value.Limit.Policy())
	told := toldUntil(value)
	ats := []int64{now, now + 1, now - 1, now + d.span(1e6), now + d.span(1e15), now - d.span(1e15), 0, d.Int64N(1 << 52)}
	var questions []question
	for range 6 {
		cost, at := one(d, costs...), min(max(one(d, ats...), 0), 1<<52)
		if policy == "ratelimit.CalendarWindow" { // of windows that are over it is not told how long they were
			at = min(max(at, now), told-1)
		}
		questions = append(questions, question{page, name, at, cost, maxOwed, policy, told})
		wait, err := value.RetryAfter(time.UnixMicro(at), cost)
		if turn := at + wait.Microseconds(); err == nil && wait > 0 && turn < 1<<52 {
			questions = append(questions, question{page, name, turn - 1, cost, maxOwed, policy, told}, question{page, name, turn, cost, maxOwed, policy, told})
		}
		_, reserved := value.Reserve(time.UnixMicro(at), cost)
		if turn := at + reserved.RetryAfter.Microseconds(); reserved.RetryAfter > 0 && turn < 1<<52 {
			questions = append(questions, question{page, name, turn - 1, cost, maxOwed, policy, told}, question{page, name, turn, cost, maxOwed, policy, told})
		}
	}
	return questions
}

// maxReserved returns the MaxReserved of the limit's policy.
func maxReserved(limit ratelimit.Limit) float64 {
	switch policy := limit.Policy().(type) {
	case ratelimit.TokenBucket:
		return policy.MaxReserved
	case ratelimit.FixedWindow:
		return policy.MaxReserved
	case ratelimit.CalendarWindow:
		return policy.MaxReserved
	}
	return 0
}

// insert writes the rows for alice.
func insert(t *testing.T, pool *pgxpool.Pool, rows []row) {
	t.Helper()
	batch := &pgx.Batch{}
	for _, r := range rows {
		batch.Queue(`INSERT INTO ratelimit.buckets (name, key, shard, value, ts, taken, leases) VALUES ($1, 'alice', 0, $2, $3, $4, $5)`,
			r.limit.Name(), r.value, r.ts, r.taken, r.leases)
	}
	require.NoError(t, pool.SendBatch(t.Context(), batch).Close())
}

// alice is the only user of a site.
func alice(*http.Request) (string, error) { return "alice", nil }

// newClientState returns the handler of a site whose users key tells apart.
func newClientState(t *testing.T, limiter *ratelimit.Limiter, key httplimit.Key, limits ...ratelimit.Limit) http.Handler {
	t.Helper()
	handler, err := httplimit.NewClientState(httplimit.ClientStateConfig{
		Limiter: limiter, Key: key, Limits: limits,
		Timeout: time.Hour, // a busy machine is no reason to refuse
	})
	require.NoError(t, err)
	return handler
}
