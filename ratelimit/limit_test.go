package ratelimit_test

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const century = 36525 * ratelimit.Day

func TestNewLimitChecksTheName(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"a", "sendMessage", "A-Z.a_z:0/9", strings.Repeat("n", 64)} {
		limit, err := ratelimit.NewLimit(name, ratelimit.PerSecond(1))
		require.NoError(t, err, "%q", name)
		require.Equal(t, name, limit.Name())
	}
	for _, name := range []string{
		"", " ", "a b", " a", "a\n", "a\x00", "é", "a;b", `a"b`, "a'b", "\xff", strings.Repeat("n", 65), strings.Repeat("n", 1<<20),
	} {
		limit, err := ratelimit.NewLimit(name, ratelimit.PerSecond(1))
		require.ErrorIs(t, err, ratelimit.ErrInvalidLimit, "%q", name)
		require.ErrorContains(t, err, "use 1 to 64 letters, digits and _ . : / -")
		require.Less(t, len(err.Error()), 1000, "a huge name is not repeated whole")
		require.Zero(t, limit)
	}
}

// TestNewLimitChecksThePolicy covers each invalid number, and the error text for it.
func TestNewLimitChecksThePolicy(t *testing.T) {
	t.Parallel()
	const second, none = time.Second, ratelimit.None
	for _, c := range []struct {
		name                        string
		rate, capacity, maxReserved float64
		period                      time.Duration
		text                        string
	}{
		{name: "ZeroRate", rate: 0, period: second, text: "Rate is 0; it must be from 1e-09"},
		{name: "NegativeRate", rate: -1, period: second, text: "Rate is -1"},
		{name: "NaNRate", rate: math.NaN(), period: second, text: "Rate is NaN"},
		{name: "InfiniteRate", rate: math.Inf(1), period: second, text: "Rate is +Inf"},
		{name: "TinyRate", rate: 9e-10, period: second, text: "Rate is 9e-10"},
		{name: "HugeRate", rate: 1.1e12, period: second, text: "Rate is 1.1e+12"},
		{name: "ZeroPeriod", rate: 1, period: 0, text: "Period is 0s; it must be whole microseconds"},
		{name: "NegativePeriod", rate: 1, period: -second, text: "Period is -1s"},
		{name: "ForgottenUnit", rate: 1, period: 10, text: "write 10*time.Second, not 10"},
		{name: "BrokenMicrosecond", rate: 1, period: 1500, text: "Period is 1.5µs"},
		{name: "HugePeriod", rate: 1, period: century + time.Microsecond, text: "from 1µs to 100 years"},
		{name: "NegativeCapacity", rate: 1, capacity: -1, period: second, text: "Capacity is -1; it must be from 1e-09"},
		{name: "NaNCapacity", rate: 1, capacity: math.NaN(), period: second, text: "Capacity is NaN"},
		{name: "InfiniteCapacity", rate: 1, capacity: math.Inf(1), period: second, text: "Capacity is +Inf"},
		{name: "MinusInfiniteCapacity", rate: 1, capacity: math.Inf(-1), period: second, text: "Capacity is -Inf"},
		{name: "TinyCapacity", rate: 1, capacity: 9e-10, period: second, text: "Capacity is 9e-10"},
		{name: "HugeCapacity", rate: 1e12, capacity: 1.1e12, period: second, text: "Capacity is 1.1e+12"},
		{name: "CapacityThatNeverFills", rate: 1, capacity: 101, period: ratelimit.Day * 366, text: "takes over 100 years to fill"},
		{name: "NegativeMaxReserved", rate: 1, maxReserved: -1, period: second, text: "MaxReserved is -1; it must be from 1e-09"},
		{name: "NaNMaxReserved", rate: 1, maxReserved: math.NaN(), period: second, text: "MaxReserved is NaN"},
		{name: "InfiniteMaxReserved", rate: 1, maxReserved: math.Inf(1), period: second, text: "MaxReserved is +Inf"},
		{name: "HugeMaxReserved", rate: 1e12, maxReserved: 1.1e12, period: second, text: "MaxReserved is 1.1e+12"},
		{name: "OwedAndNeverRepaid", rate: 1, maxReserved: 101, period: ratelimit.Day * 366, text: "takes over 100 years to repay"},
		{name: "NothingToTakeOrReserve", rate: 1, capacity: none, maxReserved: ratelimit.NoReservations, period: second, text: "admits nothing"},
		{name: "NothingToTakeOrOwe", rate: 1, capacity: none, maxReserved: ratelimit.None, period: second, text: "admits nothing"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for _, policy := range []ratelimit.Policy{
				ratelimit.TokenBucket{Rate: c.rate, Period: c.period, Capacity: c.capacity, MaxReserved: c.maxReserved},
				ratelimit.FixedWindow{Rate: c.rate, Period: c.period, Capacity: c.capacity, MaxReserved: c.maxReserved},
			} {
				limit, err := ratelimit.NewLimit("story", policy)
				require.ErrorIs(t, err, ratelimit.ErrInvalidLimit)
				require.ErrorContains(t, err, c.text)
				require.ErrorContains(t, err, `"story"`)
				require.Zero(t, limit)
				require.PanicsWithError(t, err.Error(), func() { ratelimit.Define("story", policy) })
			}
		})
	}
}

func TestNewLimitTakesWhatItSays(t *testing.T) {
	t.Parallel()
	for _, policy := range []ratelimit.Policy{
		ratelimit.TokenBucket{Rate: 1e-9, Period: time.Microsecond},
		ratelimit.TokenBucket{Rate: 1e12, Period: time.Microsecond, Capacity: 1e-9, MaxReserved: 1e-9},
		ratelimit.TokenBucket{Rate: 1e12, Period: century, Capacity: 1e11, MaxReserved: 1e11},
		ratelimit.TokenBucket{Rate: 1e-9, Period: century},
		ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: ratelimit.None},
		ratelimit.TokenBucket{Rate: 1, Period: time.Second, MaxReserved: ratelimit.NoReservations},
		ratelimit.FixedWindow{Rate: 1, Period: century, Start: time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)},
		ratelimit.FixedWindow{Rate: 1, Period: time.Microsecond, Start: time.Date(1, 1, 1, 0, 0, 0, 1, time.UTC)},
		&ratelimit.TokenBucket{Rate: 1, Period: time.Second},
	} {
		_, err := ratelimit.NewLimit("edge", policy)
		require.NoError(t, err, "%v", policy)
	}
	for rate := range 1000 {
		_, err := ratelimit.NewLimit("century", ratelimit.FixedWindow{Rate: float64(rate + 1), Period: century})
		require.NoError(t, err)
	}
}

func TestNewLimitChecksTheStart(t *testing.T) {
	t.Parallel()
	for _, start := range []time.Time{
		time.Date(0, 12, 31, 0, 0, 0, 0, time.UTC), time.Date(10_000, 1, 1, 0, 0, 0, 0, time.UTC),
		time.Date(586_542, 1, 1, 0, 0, 0, 0, time.UTC), time.Unix(1<<58, 0), time.Unix(-1<<58, 0),
	} {
		_, err := ratelimit.NewLimit("start", ratelimit.FixedWindow{Rate: 1, Period: time.Hour, Start: start})
		require.ErrorIs(t, err, ratelimit.ErrInvalidLimit)
		require.ErrorContains(t, err, "it must be from year 1 to year 9999")
	}
}

func TestNewLimitNeedsAPolicy(t *testing.T) {
	t.Parallel()
	for _, policy := range []ratelimit.Policy{nil, (*ratelimit.TokenBucket)(nil), (*ratelimit.FixedWindow)(nil)} {
		_, err := ratelimit.NewLimit("none", policy)
		require.ErrorIs(t, err, ratelimit.ErrInvalidLimit)
		require.ErrorContains(t, err, "pass a TokenBucket, or another")
	}
}

func TestLimitSaysWhatItIs(t *testing.T) {
	t.Parallel()
	for want, policy := range map[string]ratelimit.Policy{
		"x: 10 per minute, capacity 3":              ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3},
		"x: 10 per minute":                          ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 10},
		"x: 0.5 per second":                         ratelimit.PerSecond(0.5),
		"x: 7 per minute":                           ratelimit.PerMinute(7),
		"x: 7 per hour":                             ratelimit.PerHour(7),
		"x: 7 per day":                              ratelimit.PerDay(7),
		"x: 7 per week":                             ratelimit.PerWeek(7),
		"x: 60 per minute, no capacity":             ratelimit.TokenBucket{Rate: 60, Period: time.Minute, Capacity: ratelimit.None},
		"x: 100 per hour (fixed window)":            ratelimit.FixedWindow{Rate: 100, Period: time.Hour},
		"x: 1 per hour, capacity 5 (fixed window)":  ratelimit.FixedWindow{Rate: 1, Period: time.Hour, Capacity: 5},
		"x: 1 per hour, no capacity (fixed window)": ratelimit.FixedWindow{Rate: 1, Period: time.Hour, Capacity: ratelimit.None},
	} {
		limit := ratelimit.Define("x", policy)
		require.Equal(t, want, limit.String())
		require.Equal(t, policy, limit.Policy())
	}
	require.Equal(t, "undefined limit", ratelimit.Limit{}.String())
}

// TestAPolicyByPointerIsItsValue promises that a policy by pointer gives the same limit as by value, also if the pointed-to policy
// changes later.
func TestAPolicyByPointerIsItsValue(t *testing.T) {
	t.Parallel()
	bucket, window := ratelimit.PerSecond(10), ratelimit.FixedWindow{Rate: 100, Period: time.Hour}
	sliding, monthly := ratelimit.SlidingWindow{Rate: 5, Period: time.Minute}, ratelimit.CalendarWindow{Rate: 5, Resets: ratelimit.Monthly}
	slots, adaptive := ratelimit.Concurrency{Most: 4}, ratelimit.Adaptive{Contract: bucket, Apply: true}
	for value, pointer := range map[ratelimit.Policy]ratelimit.Policy{
		bucket: &bucket, window: &window, sliding: &sliding, monthly: &monthly, slots: &slots, adaptive: &adaptive,
		ratelimit.Adaptive{Contract: window}: &ratelimit.Adaptive{Contract: &window},
	} {
		require.Equal(t, ratelimit.Define("x", value), ratelimit.Define("x", pointer))
	}
	limit := ratelimit.Define("x", &bucket)
	bucket.Rate = 20
	require.Equal(t, ratelimit.PerSecond(10), limit.Policy())
	_, err := ratelimit.NewLimit("x", ratelimit.Adaptive{Contract: (*ratelimit.TokenBucket)(nil)})
	require.ErrorContains(t, err, "its Contract is a *ratelimit.TokenBucket; it must be a TokenBucket")
}

func TestLimitCapacityIsTheLargestCost(t *testing.T) {
	t.Parallel()
	require.Equal(t, 10.0, ratelimit.Define("x", ratelimit.PerSecond(10)).Capacity())
	require.Equal(t, 3.0, ratelimit.Define("x", ratelimit.FixedWindow{Rate: 10, Period: time.Hour, Capacity: 3}).Capacity())
	require.Zero(t, ratelimit.Define("x", ratelimit.TokenBucket{Rate: 10, Period: time.Hour, Capacity: ratelimit.None}).Capacity())
}

func TestRequestNamesNoKey(t *testing.T) {
	t.Parallel()
	limit := ratelimit.Define("sendMessage", ratelimit.PerMinute(10))
	require.Equal(t, "1 of sendMessage", limit.For("alice@example.org").String())
	require.Equal(t, "2.5 of sendMessage", limit.Global().Cost(2.5).String())
	require.Equal(t, limit, limit.For("alice@example.org").Limit())
}

func TestEqualLimitsAreOfOneNameAndOnePolicy(t *testing.T) {
	t.Parallel()
	limit := ratelimit.Define("api", ratelimit.PerSecond(5))
	require.True(t, limit == ratelimit.Define("api", ratelimit.PerSecond(5)))                       //nolint:testifylint // == is what is tested
	require.True(t, limit == ratelimit.Define("api", &ratelimit.TokenBucket{Rate: 5, Period: 1e9})) //nolint:testifylint // as above
	for _, other := range []ratelimit.Limit{
		{},
		ratelimit.Define("other", ratelimit.PerSecond(5)), ratelimit.Define("api", ratelimit.PerSecond(6)),
		ratelimit.Define("api", ratelimit.TokenBucket{Rate: 5, Period: time.Second, Capacity: 5}), // which says the same in other words
		ratelimit.Define("api", ratelimit.FixedWindow{Rate: 5, Period: time.Second}),
	} {
		require.False(t, limit == other, "%v", other) //nolint:testifylint // as above
	}
	require.Len(t, map[ratelimit.Limit]bool{limit: true, ratelimit.Define("api", ratelimit.PerSecond(5)): true}, 1)
}

// noted is a policy of a type that cannot be compared.
type noted struct {
	ratelimit.TokenBucket

	notes []string
}

func TestAPolicyThatCannotBeComparedIsALimit(t *testing.T) {
	t.Parallel()
	policy := noted{ratelimit.PerSecond(5), []string{"for the demo"}}
	limit := ratelimit.Define("api", policy)
	again := limit
	require.Equal(t, policy, limit.Policy())
	require.Equal(t, "api: "+ratelimit.PerSecond(5).String(), limit.String())
	require.InDelta(t, 5, limit.Capacity(), 0)
	require.True(t, limit == again)                                            //nolint:testifylint // == is what is tested
	require.False(t, limit == ratelimit.Define("api", ratelimit.PerSecond(5))) //nolint:testifylint // as above
	value := limit.For("key").Full(time.Unix(0, 0))
	_, decision := value.Take(time.Unix(0, 0), 5)
	require.True(t, decision.Allowed)
	require.True(t, decision.States[0].Limit == limit) //nolint:testifylint // as above
	require.Equal(t, policy, decision.States[0].Limit.Policy())
}
