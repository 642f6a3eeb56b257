package ratelimit_test

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	century = 36525 * ratelimit.Day
	second  = time.Second
	none    = ratelimit.None
)

// The policies of most rows below.
type (
	tokens   = ratelimit.TokenBucket
	windows  = ratelimit.FixedWindow
	sliding  = ratelimit.SlidingWindow
	calendar = ratelimit.CalendarWindow
	slots    = ratelimit.Concurrency
)

// wrong is a policy that NewLimit refuses, and a part of the error.
type wrong struct {
	policy ratelimit.Policy
	says   string
}

// Each invalid policy gives an error that names the field and what to write.
func TestNewLimitNamesTheInvalidField(t *testing.T) {
	t.Parallel()
	for _, rows := range [][]wrong{wrongNumbers(), wrongCalendars(), wrongPolicies()} {
		for _, c := range rows {
			policies := []ratelimit.Policy{c.policy}
			if p, ok := c.policy.(tokens); ok {
				policies = append(policies, windows{Rate: p.Rate, Period: p.Period, Capacity: p.Capacity, MaxReserved: p.MaxReserved, Shards: p.Shards})
			}
			for _, policy := range policies {
				limit, err := ratelimit.NewLimit("wrong", policy)
				require.ErrorIs(t, err, ratelimit.ErrInvalidLimit, c.says)
				require.ErrorContains(t, err, c.says)
				require.ErrorContains(t, err, `"wrong"`)
				require.Zero(t, limit)
				require.PanicsWithError(t, err.Error(), func() { ratelimit.Define("wrong", policy) })
			}
		}
	}
	for _, name := range []string{
		"", " ", "a b", " a", "a\n", "a\x00", "é", "a;b", `a"b`, "a'b", "\xff", strings.Repeat("n", 65), strings.Repeat("n", 1<<20),
	} {
		_, err := ratelimit.NewLimit(name, ratelimit.PerSecond(1))
		require.ErrorIs(t, err, ratelimit.ErrInvalidLimit, "%q", name)
		require.ErrorContains(t, err, "use 1 to 64 letters, digits and _ . : / -")
		require.Less(t, len(err.Error()), 1000, "a huge name is not repeated whole")
	}
}

// wrongNumbers are token buckets, whose numbers fixed windows may not have either.
func wrongNumbers() []wrong {
	const shards = "; it must be 1, 2, 4, 8, 16, 32 or 64, so that each row's part is exact"
	return []wrong{
		{tokens{Period: second}, "its Rate is 0; it must be from 1e-09 to 1e+12 tokens each Period; to refuse every request, pause the limit"},
		{tokens{Rate: math.NaN(), Period: second}, "Rate is NaN"},
		{tokens{Rate: 9e-10, Period: second}, "Rate is 9e-10"},
		{tokens{Rate: 1.1e12, Period: second}, "Rate is 1.1e+12"},
		{tokens{Rate: 1}, "its Period is 0s; it must be whole microseconds"},
		{tokens{Rate: 1, Period: -second}, "Period is -1s"},
		{tokens{Rate: 1, Period: 10}, "write 10*time.Second, not 10"},
		{tokens{Rate: 1, Period: 1500}, "Period is 1.5µs"},
		{tokens{Rate: 1, Period: century + time.Microsecond}, "from 1µs to 100 years"},
		{tokens{Rate: 1, Capacity: -1, Period: second}, "its Capacity is -1; it must be from 1e-09"},
		{tokens{Rate: 1, Capacity: math.NaN(), Period: second}, "Capacity is NaN"},
		{tokens{Rate: 1, Capacity: 9e-10, Period: second}, "Capacity is 9e-10"},
		{tokens{Rate: 1e12, Capacity: 1.1e12, Period: second}, "Capacity is 1.1e+12"},
		{tokens{Rate: 1, Capacity: 101, Period: ratelimit.Day * 366}, "takes over 100 years to fill"},
		{tokens{Rate: 1, MaxReserved: -1, Period: second}, "its MaxReserved is -1; it must be from 1e-09"},
		{tokens{Rate: 1, MaxReserved: math.NaN(), Period: second}, "MaxReserved is NaN"},
		{tokens{Rate: 1e12, MaxReserved: 1.1e12, Period: second}, "MaxReserved is 1.1e+12"},
		{tokens{Rate: 1, MaxReserved: 101, Period: ratelimit.Day * 366}, "takes over 100 years to repay"},
		{tokens{Rate: 1, Capacity: none, MaxReserved: ratelimit.NoReservations, Period: second}, "admits nothing"},
		{tokens{Rate: 1, Capacity: none, MaxReserved: none, Period: second}, "admits nothing"},
		{tokens{Rate: 1, Period: second, Shards: -8}, "its Shards is -8" + shards},
		{tokens{Rate: 1, Period: second, Shards: 6}, "its Shards is 6" + shards},
		{tokens{Rate: 1, Period: second, Shards: 128}, "its Shards is 128" + shards},
		{tokens{Rate: 1, Period: second, Shards: math.MinInt}, shards},
	}
}

func wrongCalendars() []wrong {
	rows := []wrong{
		{calendar{Rate: 1}, "Resets is not set"},
		{calendar{Rate: 1, Resets: "fortnight"}, `Resets is "fortnight"`},
		{calendar{Resets: ratelimit.Daily}, "Rate is 0"},
		{
			calendar{Rate: 1, Resets: ratelimit.Daily, FirstDay: 2},
			"FirstDay, which is for Monthly, Quarterly and Yearly windows; leave it out of one for each day",
		},
		{calendar{Rate: 1, Resets: ratelimit.Weekly, FirstMonth: 2}, "FirstMonth, which is for Quarterly"},
		{calendar{Rate: 1, Resets: ratelimit.Weekly, FirstWeekday: 7}, "FirstWeekday is 7"},
		{calendar{Rate: 1, Resets: ratelimit.Monthly, FirstWeekday: time.Monday}, "FirstWeekday, which is for Weekly"},
		{calendar{Rate: 1, Resets: ratelimit.Monthly, FirstMonth: time.March}, "FirstMonth, which is for Quarterly"},
		{calendar{Rate: 1, Resets: ratelimit.Monthly, FirstDay: 32}, "FirstDay is 32"},
		{calendar{Rate: 1, Resets: ratelimit.Monthly, FirstDay: -1}, "FirstDay is -1"},
		{calendar{Rate: 1, Resets: ratelimit.Yearly, FirstMonth: 13}, "FirstMonth is 13"},
		{calendar{Rate: 10, Resets: ratelimit.Monthly, MaxReserved: 11}, "up to its Rate of 10"},
	}
	for zone, says := range map[string]string{
		"Local": "", "LOCALTIME": "", "CET": "", "EST5EDT": "", "UTC-5": "three hours ahead of UTC",
		"Foo+3": `knows no time zone "Foo+3"`, "europe/berlin": "", "Europe": "", "Europe/Berlni+1": "", "+03:00": "", "5": "", "Europe/Berlin\x00": "",
		"Europe//Berlin": "", "../etc/passwd": "", "<+03>-3": "", "Straße": "", "A" + string(make([]byte, 100)): "",
	} {
		if says == "" {
			says = "knows no time zone"
		}
		rows = append(rows, wrong{calendar{Rate: 1, Resets: ratelimit.Monthly, Zone: zone}, says})
	}
	return rows
}

// wrongPolicies are of the other kinds, or none.
func wrongPolicies() []wrong {
	rows := []wrong{
		{nil, "pass a TokenBucket, or another"},
		{(*tokens)(nil), "pass a TokenBucket, or another"},
		{(*windows)(nil), "pass a TokenBucket, or another"},
		{sliding{Period: second}, "its Rate is 0"},
		{sliding{Rate: 1}, "its Period is 0s"},
		{sliding{Rate: 1, Period: time.Nanosecond}, "its Period is 1ns"},
		{sliding{Rate: 5, Period: time.Minute, Slices: 129}, "its Slices is 129; it must be from 1 to 128, or 0 for 60"},
		{sliding{Rate: 5, Period: time.Minute, Slices: -1}, "its Slices is -1"},
		{sliding{Rate: 5, Period: second, Slices: 60}, "leave out Slices for 50, or set it to a number that divides 1000000"},
		{slots{}, "from 1 to 1000 slots"},
		{slots{Slots: -1}, "its Slots is -1"},
		{slots{Slots: 1001}, "its Slots is 1001"},
		{slots{Slots: 1, Lease: 30}, "its Lease is 30ns"},
		{slots{Slots: 1, Lease: second + 500}, "its Lease is 1.0000005s"},
		{slots{Slots: 1, Lease: ratelimit.Day + 10*time.Microsecond}, "its Lease is 24h0m0.00001s"},
		{slots{Slots: 1, Lease: -time.Minute}, "its Lease is -1m0s"},
	}
	for _, start := range []time.Time{
		time.Date(0, 12, 31, 0, 0, 0, 0, time.UTC), time.Date(10_000, 1, 1, 0, 0, 0, 0, time.UTC),
		time.Date(586_542, 1, 1, 0, 0, 0, 0, time.UTC), time.Unix(1<<58, 0), time.Unix(-1<<58, 0),
	} {
		rows = append(rows, wrong{windows{Rate: 1, Period: time.Hour, Start: start}, "it must be from year 1 to year 9999"})
	}
	return rows
}

// These policies and names are just valid.
func TestNewLimitAcceptsTheDocumentedRange(t *testing.T) {
	t.Parallel()
	policies := []ratelimit.Policy{
		tokens{Rate: 1e-9, Period: time.Microsecond},
		tokens{Rate: 1e12, Period: time.Microsecond, Capacity: 1e-9, MaxReserved: 1e-9},
		tokens{Rate: 1e12, Period: century, Capacity: 1e11, MaxReserved: 1e11},
		tokens{Rate: 1e-9, Period: century},
		windows{Rate: 1, Period: century, Start: time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)},
		windows{Rate: 1, Period: time.Microsecond, Start: time.Date(1, 1, 1, 0, 0, 0, 1, time.UTC)},
		slots{Slots: 1000, Lease: ratelimit.Day},
		slots{Slots: 1, Lease: time.Millisecond},
	}
	for rate := range 1000 {
		policies = append(policies, windows{Rate: float64(rate + 1), Period: century})
	}
	for _, shards := range []int{0, 1, 2, 4, 8, 16, 32, 64} {
		policies = append(policies, tokens{Rate: 1, Period: second, Shards: shards})
	}
	for _, zone := range []string{"UTC", "Etc/GMT+12", "Etc/GMT-14", "Etc/GMT0", "Etc/GMT+0", "America/Argentina/ComodRivadavia"} {
		policies = append(policies, calendar{Rate: 1, Resets: ratelimit.Monthly, Zone: zone})
	}
	for _, policy := range policies {
		limit, err := ratelimit.NewLimit("edge", policy)
		require.NoError(t, err, "%v", policy)
		require.Equal(t, policy, limit.Policy())
	}
	for _, name := range []string{"a", "sendMessage", "A-Z.a_z:0/9", strings.Repeat("n", 64)} {
		require.Equal(t, name, ratelimit.Define(name, ratelimit.PerSecond(1)).Name())
	}
}

// noted is a policy of a type that cannot be compared.
type noted struct {
	ratelimit.TokenBucket

	notes []string
}

// Two limits are equal if their names and policies are. A policy by pointer is the same as by value, also if the
// pointed-to policy changes later.
//
//nolint:testifylint // == is tested
func TestEqualLimitsAreOfOneNameAndOnePolicy(t *testing.T) {
	t.Parallel()
	bucket, window, slide := ratelimit.PerSecond(5), windows{Rate: 100, Period: time.Hour}, sliding{Rate: 5, Period: time.Minute}
	monthly, jobs := calendar{Rate: 5, Resets: ratelimit.Monthly}, slots{Slots: 4}
	for value, pointer := range map[ratelimit.Policy]ratelimit.Policy{
		bucket: &bucket, window: &window, slide: &slide, monthly: &monthly, jobs: &jobs,
	} {
		require.True(t, ratelimit.Define("x", value) == ratelimit.Define("x", pointer))
	}
	limit := ratelimit.Define("x", &bucket)
	bucket.Rate = 20
	require.Equal(t, ratelimit.PerSecond(5), limit.Policy())
	uncomparable := ratelimit.Define("x", noted{ratelimit.PerSecond(5), []string{"for the demo"}})
	for _, other := range []ratelimit.Limit{
		{},
		ratelimit.Define("other", ratelimit.PerSecond(5)), ratelimit.Define("x", ratelimit.PerSecond(6)),
		ratelimit.Define("x", tokens{Rate: 5, Period: second, Capacity: 5}), // in other words
		ratelimit.Define("x", windows{Rate: 5, Period: second}), uncomparable,
	} {
		require.False(t, limit == other, "%v", other)
	}
	require.Len(t, map[ratelimit.Limit]bool{limit: true, ratelimit.Define("x", ratelimit.PerSecond(5)): true}, 1)

	again := uncomparable
	require.True(t, again == uncomparable)
	require.Equal(t, noted{ratelimit.PerSecond(5), []string{"for the demo"}}, again.Policy())
	_, d := again.For("key").FullValue(at).Take(at, 5)
	require.True(t, d.Allowed)
	require.True(t, d.States[0].Limit == uncomparable)
}

// Without a Start, the windows of each key begin at other instants, which are the same in every process.
func TestFixedWindowWithoutStart(t *testing.T) {
	t.Parallel()
	policy := ratelimit.FixedWindow{Rate: 5, Period: time.Hour}
	begin := func(name, key string) time.Time { // of the window that at is in
		_, d := ratelimit.Define(name, policy).For(key).FullValue(at).Take(at, 5)
		require.True(t, d.Allowed)
		return at.Add(d.ResetAfter - time.Hour)
	}
	// FNV-1a of "spread\x00key1" modulo an hour. A release that changes it moves all windows once.
	require.Equal(t, int64(1772408367189456), begin("spread", "key1").UnixMicro())
	require.NotEqual(t, begin("a", "key"), begin("b", "key"))
	require.NotEqual(t, begin("a", "bc"), begin("ab", "c"))
	begins := make(map[time.Duration]int)
	for i := range 1000 {
		begins[begin("spread", fmt.Sprintf("key%d", i)).Sub(at).Truncate(6*time.Minute)]++
	}
	require.Len(t, begins, 10) // of ten stretches of six minutes
	for stretch, keys := range begins {
		require.InDelta(t, 100, keys, 50, "windows that begin about %v", stretch)
	}
}
