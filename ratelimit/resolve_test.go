package ratelimit

import (
	"context"
	"fmt"
	"log"
	"log/slog"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/slots"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// use notes a limit.
func (p *policies) use(limit Limit) { p.note(limit.Name(), limit) }

// used returns a limit of that name with only a rate.
func used(name string, rate float64) Limit {
	return limitOf(name, madeElsewhere{}, bucket.Terms{Rate: rate})
}

func TestPoliciesRememberTheLastAndTheDistinctOnes(t *testing.T) {
	t.Parallel()
	p := &policies{}
	require.Nil(t, p.last("limit"))
	require.Empty(t, p.seen("limit"))
	for _, rate := range []float64{1, 2, 2, 1, 3, 1} {
		p.use(used("limit", rate))
		require.Equal(t, rate, p.last("limit").terms().Rate)
	}
	require.Equal(t, []bucket.Terms{{Rate: 1}, {Rate: 2}, {Rate: 3}}, p.seen("limit"))

	for n := range 2 * maxPolicies {
		p.use(used("limit", float64(100+n)))
	}
	require.Len(t, p.seen("limit"), maxPolicies)
	for _, t2 := range p.seen("limit") {
		require.GreaterOrEqual(t, t2.Rate, float64(100+maxPolicies), "the older ones give way")
	}
	for n := range 2 * maxNames {
		p.use(used(fmt.Sprint("limit ", n), 1))
	}
	require.EqualValues(t, maxNames, p.count.Load())
	require.Equal(t, float64(100+2*maxPolicies-1), p.last("limit").terms().Rate)
}

// heardEvents is an Observer that collects its events.
type heardEvents struct {
	mu     sync.Mutex
	events []event.Event
}

func (h *heardEvents) Observe(_ context.Context, e event.Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events = append(h.events, e)
}

// TestANameWithTwoPoliciesIsReportedOnce: of all calls under two policies, only the first that differs is reported.
func TestANameWithTwoPoliciesIsReportedOnce(t *testing.T) {
	t.Parallel()
	heard := &heardEvents{}
	limiter, err := New(&answering{}, Config{Observer: heard})
	require.NoError(t, err)
	api, more := Define("api", PerHour(10)), Define("api", PerHour(20))
	same := Define("api", TokenBucket{Rate: 10, Period: time.Hour, Capacity: 10})
	limiter.Resolve(api.For("ada"))
	limiter.Resolve(same.For("ada"))
	require.Empty(t, heard.events, "one policy in other words")
	var callers sync.WaitGroup
	for range 8 {
		callers.Go(func() {
			limiter.Resolve(more.For("ada"))
			limiter.Resolve(api.For("bob"))
			limiter.WithTx(nil).Resolve(Define("api", PerHour(30)).For("ada"))
		})
	}
	callers.Wait()
	require.Len(t, heard.events, 1)
	require.Len(t, limiter.policies.seen("api"), 3, "each once")
	told := heard.events[0].(event.PolicyConflict)
	require.Equal(t, "api", told.Limit)
	require.Equal(t, api.Policy(), told.Before)
	require.Contains(t, []Policy{PerHour(20), PerHour(30)}, told.Policy)
}

// TestANameWithTwoPoliciesIsLoggedOnce: without an Observer, slog has it.
//
//nolint:paralleltest // it replaces slog's default logger
func TestANameWithTwoPoliciesIsLoggedOnce(t *testing.T) {
	var text strings.Builder
	logger, output, flags := slog.Default(), log.Writer(), log.Flags()
	t.Cleanup(func() {
		slog.SetDefault(logger)
		log.SetOutput(output)
		log.SetFlags(flags)
	})
	slog.SetDefault(slog.New(slog.NewTextHandler(&text, nil)))
	limiter, err := New(&answering{}, Config{})
	require.NoError(t, err)
	for range 3 {
		limiter.Resolve(Define("api", PerHour(10)).For("ada"))
		limiter.Resolve(Define("api", PerHour(20)).For("ada"))
	}
	require.Equal(t, 1, strings.Count(text.String(), "\n"), text.String())
	require.Contains(t, text.String(), `level=WARN msg="ratelimit: one name, two policies`)
	require.Contains(t, text.String(), `limit=api before="10 per hour" policy="20 per hour"`)
}

// A sliding window has 60 slices, or the next smaller number that divides its period.
func TestSlicesOfASlidingWindow(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		period time.Duration
		slices int32
	}{
		{time.Minute, 60}, {time.Second, 50}, {999_983 * time.Microsecond, 1}, {time.Microsecond, 1}, {36525 * Day, 60},
	} {
		terms := Define("sliding", SlidingWindow{Rate: 5, Period: test.period}).terms()
		require.Equal(t, bucket.Sliding{Slices: test.slices}, terms.Kind)
		require.Equal(t, test.period.Microseconds()/int64(test.slices), terms.Step)
		require.False(t, terms.Reserves)
	}
	require.Equal(t, bucket.Sliding{Slices: 128}, Define("sliding", SlidingWindow{Rate: 5, Period: 128 * time.Second, Slices: 128}).terms().Kind)
}

// TestLeaseFromContext promises that the work finds the innermost lease, and none without a lease.
func TestLeaseFromContext(t *testing.T) {
	t.Parallel()
	l, err := New(&answering{}, Config{})
	require.NoError(t, err)
	_, found := LeaseFromContext(t.Context())
	require.False(t, found)
	held, release := l.KeepAlive(t.Context(), Lease{})
	_, found = LeaseFromContext(held)
	require.False(t, found)
	require.NoError(t, held.Err())
	release()
	require.Equal(t, context.Canceled, held.Err())
}

// FuzzLeaseID checks that Acquire could have written every accepted ID, and that it is safe in a statement.
func FuzzLeaseID(f *testing.F) {
	share := func(name, key, plan string, slotCount, length int64) slots.Share {
		return slots.Share{Row: bucket.Key{Name: name, Key: key}, Plan: plan, Slots: slotCount, Length: length}
	}
	for _, of := range [][]slots.Share{
		nil,
		{share("jobs", "", "", 1, 1000)},
		{share("jobs", "k", "pro", 1, 1000), share("jobs", "l", "", 3, 1000)},
		{share("b", "", "", 1, 1000), share("a", "", "", 1, 1000)},
		{share("jobs", "\x00", "", 1001, 1)},
	} {
		f.Add((&slots.ID{Fence: 7, Of: of}).String())
	}
	f.Add((&slots.ID{Fence: math.MaxInt64, Of: []slots.Share{share("jobs", "", "", 1, 1000)}}).String())
	f.Add("L1AAAAAA")
	f.Fuzz(func(t *testing.T, text string) {
		id, err := parseLeaseID(text)
		if err != nil {
			require.ErrorIs(t, err, ErrInvalidLease)
			require.Nil(t, id)
			require.Less(t, len(err.Error()), 300)
			return
		}
		require.Equal(t, text, id.String())
		require.Positive(t, id.Fence)
		require.LessOrEqual(t, len(id.Of), maxRequests)
		for i, of := range id.Of {
			_, err := storedKey(nil, &Request{limit: limitOf(of.Row.Name, madeElsewhere{}, bucket.Terms{}), key: of.Row.Key, stored: true})
			require.NoError(t, err)
			_, err = NewLimit(of.Row.Name, Concurrency{Slots: 1, Lease: time.Duration(of.Length) * time.Microsecond})
			require.NoError(t, err)
			require.LessOrEqual(t, of.Slots, int64(maxSlots))
			require.GreaterOrEqual(t, of.Slots, int64(0))
			if i > 0 {
				require.Negative(t, id.Of[i-1].Row.Compare(of.Row))
			}
		}
	})
}
