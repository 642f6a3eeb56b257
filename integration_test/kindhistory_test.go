package integration_test

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The answers to many concurrent callers in three processes, for a bucket of each kind, must be linearizable: the
// method Take of a Value of each bucket, which the tests of package bucket compare with exact models, gives the same
// answers to the calls in some order. In that order no call is answered before it began, and each decides at an instant
// that the clock showed meanwhile. The callers move the clock as they call, and the test does between two phases.
const (
	kindCallers, kindPhases = 8, 3
	// kindPace is by how much a call moves the clock at most: a phase lasts less than a minute, because after a minute the
	// clock reading of a slow call would count as a wrong clock.
	kindPace = 180 * time.Millisecond
)

// The kinds, in the order of kindLimits.
const (
	kindTokens = iota
	kindFixed
	kindSlides
	kindCalendar
	kindHeld
	kinds
)

var (
	kindStart = time.Date(2026, 3, 28, 12, 0, 0, 0, time.UTC) // the next day in Berlin has 23 hours

	kindLimits = [kinds]ratelimit.Limit{
		ratelimit.Define("mixed-tokens", ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: 8}),
		ratelimit.Define("mixed-fixed", ratelimit.FixedWindow{Rate: 6, Period: 10 * time.Second, Start: clockNoon}),
		ratelimit.Define("mixed-slides", ratelimit.SlidingWindow{Rate: 7, Period: 12 * time.Second, Slices: 4}),
		ratelimit.Define("mixed-calendar", ratelimit.CalendarWindow{Rate: 300, Resets: ratelimit.Daily, Zone: "Europe/Berlin"}),
		ratelimit.Define("mixed-held", ratelimit.Concurrency{Slots: 3, Lease: 2 * time.Second}),
	}
)

// kindCall is a call, with its cost for each kind. 0 means that the call is not over that kind.
type kindCall struct {
	costs [kinds]float64
	check bool
	order []int // of the requests
}

// kindReply is the answer to a call.
type kindReply struct {
	ratelimit.Decision
	lease ratelimit.Lease
}

func (c *kindCall) requests() (requests []ratelimit.Request) {
	for _, kind := range c.order {
		requests = append(requests, kindLimits[kind].For("key").Cost(c.costs[kind]))
	}
	return requests
}

// call makes the call.
func (c *kindCall) call(ctx context.Context, l *ratelimit.Limiter) (r kindReply, err error) {
	switch {
	case c.check:
		r.Decision, err = l.Check(ctx, c.requests()...)
	case c.costs[kindHeld] > 0:
		r.lease, err = l.Acquire(ctx, c.requests()...)
		r.Decision = r.lease.Decision
	default:
		r.Decision, err = l.Take(ctx, c.requests()...)
	}
	return r, err
}

// kindState has the buckets of all kinds.
type kindState [kinds]ratelimit.Value

func newKindState() (s kindState) {
	for kind, limit := range kindLimits {
		s[kind] = limit.For("key").FullValue(kindStart)
	}
	return s
}

func (s *kindState) equal(o *kindState) bool {
	for kind := range s {
		text, _ := json.Marshal(s[kind])
		other, _ := json.Marshal(o[kind])
		before, _, _ := strings.Cut(string(text), `"now_us"`)
		if !strings.HasPrefix(string(other), before) {
			return false
		}
	}
	return true
}

// take returns the state after a call, and the decision of each bucket.
func (s kindState) take(c *kindCall, at time.Time) (after kindState, decisions [kinds]ratelimit.Decision, allowed bool) {
	after, allowed = s, true
	for _, kind := range c.order {
		after[kind], decisions[kind] = s[kind].Take(at, c.costs[kind])
		allowed = allowed && decisions[kind].Allowed
	}
	if !allowed || c.check {
		after = s
	}
	return after, decisions, allowed
}

// after returns the state after a call with this answer, and whether this can be the answer.
func (s kindState) after(c *kindCall, r kindReply) (after kindState, isPossible bool) {
	after, decisions, allowed := s.take(c, r.At)
	if r.Allowed != allowed {
		return s, false
	}
	longest := time.Duration(0)
	for i, kind := range c.order {
		told, want := r.States[i], decisions[kind]
		longest = max(longest, told.RetryAfter)
		isLate := kind == kindHeld && told.RetryAfter > want.RetryAfter // the end of all leases, in a SERIALIZABLE transaction
		if told.Allowed != want.Allowed || told.RetryAfter != want.RetryAfter && !isLate || told.Cost != c.costs[kind] {
			return s, false
		}
		if !c.check && math.Abs(told.Value.Tokens-after[kind].At(r.At)) > 1e-6 {
			return s, false
		}
	}
	isHeld := func(l ratelimit.Lease) bool { return l.Fence == r.lease.Fence && l.Until.Equal(r.lease.Until) }
	if r.lease.ID != "" && !slices.ContainsFunc(after[kindHeld].Leases(), isHeld) {
		return s, false
	}
	return after, r.RetryAfter == longest
}

// kindQuestion is the question of one operation: calls that take effect together.
type kindQuestion struct {
	calls  []*kindCall
	undone bool      // the calls were in a transaction that was rolled back
	began  time.Time // by the clock
}

// kindReplies are the answers to the calls that were made. The last may be a refusal.
type kindReplies struct {
	told  []kindReply
	ended time.Time
}

var kindModel = porcupine.Model{
	Init: func() any { return newKindState() },
	Step: func(state, input, output any) (bool, any) {
		was, asked, told := state.(kindState), input.(kindQuestion), output.(kindReplies)
		after := was
		for i, r := range told.told {
			next, isPossible := after.after(asked.calls[i], r)
			if !isPossible || r.At.Before(asked.began) || r.At.After(told.ended) {
				return false, was
			}
			after = next
		}
		if asked.undone {
			return true, was
		}
		return true, after
	},
	Equal: func(a, b any) bool {
		one, other := a.(kindState), b.(kindState)
		return one.equal(&other)
	},
}

// operation is a call and its question.
type operation struct {
	asks kindQuestion
	call func(context.Context) (kindReplies, error)
}

// recorder records the questions and answers of callers. It numbers calls and returns as they happen, because clock
// readings could be equal.
type recorder struct{ events atomic.Int64 }

func (r *recorder) record(ctx context.Context, caller int, o operation) (porcupine.Operation, error) {
	call := r.events.Add(1)
	told, err := o.call(ctx)
	return porcupine.Operation{ClientId: caller, Input: o.asks, Call: call, Output: told, Return: r.events.Add(1)}, err
}

// recordAll makes concurrent callers do a number of operations each.
func (r *recorder) recordAll(t *testing.T, callers, each int, draw func(caller int, random *rand.Rand) operation) []porcupine.Operation {
	t.Helper()
	seed := testkit.Seed(t)
	histories := make([][]porcupine.Operation, callers)
	require.NoError(t, atonce.Do(callers, func(caller int) error {
		random := rand.New(rand.NewPCG(seed, uint64(caller)))
		for range each {
			recorded, err := r.record(t.Context(), caller, draw(caller, random))
			if err != nil {
				return err
			}
			histories[caller] = append(histories[caller], recorded)
		}
		return nil
	}))
	return slices.Concat(histories...)
}

// judge finds an order within milliseconds in which no call is answered before it began and the model gives the same
// answers. If there were none, it would need very long for many concurrent calls, because it must try all orders.
func judge(history ...porcupine.Operation) porcupine.CheckResult {
	return porcupine.CheckOperationsTimeout(kindModel, history, 5*time.Minute)
}

func requireLinearizable(t *testing.T, history []porcupine.Operation) {
	t.Helper()
	result := judge(history...)
	if result != porcupine.Ok {
		for _, o := range history {
			t.Logf("%+v", o)
		}
	}
	require.Equal(t, porcupine.Ok, result)
}

// requireOnce checks that the model accepts the answer of take once, and not the same tokens a second time.
func requireOnce(t *testing.T, take operation) {
	t.Helper()
	var r recorder
	told, err := r.record(t.Context(), 0, take)
	require.NoError(t, err)
	requireLinearizable(t, []porcupine.Operation{told})
	again := told
	again.Call, again.Return = r.events.Add(1), r.events.Add(1)
	require.Equal(t, porcupine.Illegal, judge(told, again))
}

// kindHistory is what callers do with a bucket of each kind.
type kindHistory struct {
	b         *bundle
	clock     *clock
	processes []*ratelimit.Limiter

	// looksApart reports whether a look reads one row after the other, as docs/operations.md says of Citus. Then each call
	// is for one row.
	looksApart bool
}

func newKindHistory(t *testing.T, on backend) *kindHistory {
	t.Helper()
	h := &kindHistory{b: on.setup(t), clock: &clock{}, looksApart: on.name == byRoutedStatements.name}
	h.clock.set(kindStart)
	for _, config := range []ratelimit.Config{{}, {}, {NoBatching: true}} {
		config.AsOf = h.clock.now
		h.processes = append(h.processes, h.b.with(t, config))
	}
	return h
}

// TestHistoryOfAllKindsIsLinearizable makes concurrent calls, many of them for several kinds, in batches and unbatched,
// alone and in transactions that are committed or rolled back. On each backend, some order of the calls one after the
// other explains all answers.
func TestHistoryOfAllKindsIsLinearizable(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, on backend) {
		t.Helper()
		h := newKindHistory(t, on)
		var r recorder
		var history []porcupine.Operation
		for range kindPhases {
			history = append(history, r.recordAll(t, kindCallers, testkit.Sized(8, 40), h.draw)...)
			h.clock.set(h.clock.now().Add(time.Duration(rand.Int64N(int64(2 * ratelimit.Day)))))
		}
		isAllowed := func(o porcupine.Operation) bool { return o.Output.(kindReplies).told[0].Allowed }
		require.True(t, slices.ContainsFunc(history, isAllowed), "some are allowed")
		require.True(t, slices.ContainsFunc(history, func(o porcupine.Operation) bool { return !isAllowed(o) }), "some are refused")
		requireLinearizable(t, history)

		another := newKindHistory(t, on)
		for kind, limit := range kindLimits {
			c := &kindCall{order: []int{kind}}
			c.costs[kind] = 1 + math.Floor(limit.Capacity()/2)
			requireOnce(t, another.operation(another.processes[0], []*kindCall{c}, callers()[3], false))
		}
	}, onPostgres, inMemory, byRoutedStatements)
}

// draw returns an operation.
func (h *kindHistory) draw(caller int, random *rand.Rand) operation {
	h.clock.unixMicro.Add(random.Int64N(kindPace.Microseconds()))
	limiter := h.processes[caller%8/3] // three, three and two callers
	first := h.drawCall(random)
	calls := []*kindCall{first}
	if random.IntN(5) < 3 {
		return h.operation(limiter, calls, callers()[3], false)
	}
	if !first.check && random.IntN(2) == 0 { // rows that are locked in another order would wait for each other
		byName := func(a, b int) int { return strings.Compare(kindLimits[a].Name(), kindLimits[b].Name()) }
		last := slices.MaxFunc(first.order, byName)
		for kind := range kinds {
			if byName(kind, last) > 0 {
				next := &kindCall{order: []int{kind}}
				next.costs[kind] = float64(1 + random.IntN(2))
				calls = append(calls, next)
				break
			}
		}
	}
	return h.operation(limiter, calls, callers()[[]int{0, 1, 2, 4}[random.IntN(4)]], random.IntN(4) == 0)
}

// drawCall returns a call for one kind, for the two that statements decide in any number, or for any.
func (h *kindHistory) drawCall(random *rand.Rand) *kindCall {
	most := [kinds]int{5, 4, 5, 120, 2}
	c := &kindCall{order: []int{random.IntN(kinds)}}
	switch several := random.IntN(5); {
	case h.looksApart:
		c.order[0] = []int{kindTokens, kindFixed, kindSlides, kindCalendar, kindHeld}[random.IntN(5)]
	case several == 0:
		c.order = []int{kindTokens, kindFixed}
	case several == 1:
		c.order = random.Perm(kinds)[:2+random.IntN(kinds-1)]
	}
	for _, kind := range c.order {
		c.costs[kind] = float64(1 + random.IntN(most[kind]))
	}
	c.check = random.IntN(10) == 0
	return c
}

// make makes the calls, up to the first that takes nothing, because such a call locks no row until the transaction
// ends.
func (h *kindHistory) make(ctx context.Context, limiter *ratelimit.Limiter, calls []*kindCall) (told []kindReply, err error) {
	for _, c := range calls {
		r, err := c.call(ctx, limiter)
		if err != nil {
			return nil, err
		}
		if told = append(told, r); !r.Allowed {
			break
		}
	}
	return told, nil
}

// operation makes calls in a place, from where they may be rolled back.
func (h *kindHistory) operation(limiter *ratelimit.Limiter, calls []*kindCall, in caller, undone bool) operation {
	asks, rolledBack := kindQuestion{calls: calls, undone: undone, began: h.clock.now()}, errors.New("rolled back")
	return operation{asks, func(ctx context.Context) (kindReplies, error) {
		var told []kindReply
		err := in.within(ctx, h.b.db(), limiter, func(l *ratelimit.Limiter) (err error) {
			if told, err = h.make(ctx, l, calls); err == nil && undone {
				err = rolledBack
			}
			return err
		})
		if errors.Is(err, rolledBack) && !ratelimit.IsRetryable(err) {
			err = nil
		}
		return kindReplies{told, h.clock.now()}, err
	}}
}
