package policytext_test

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/policytext"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// requireReadBack fails the test unless the words of a policy are read as the same policy.
func requireReadBack(t *testing.T, p ratelimit.Policy) {
	t.Helper()
	text := p.(interface{ String() string }).String()
	read, err := policytext.Parse(text)
	require.NoError(t, err)
	require.Equal(t, text, read.(interface{ String() string }).String())
	want, err := ratelimit.MarshalPolicy(p)
	require.NoError(t, err)
	got, err := ratelimit.MarshalPolicy(read)
	require.NoError(t, err)
	require.JSONEq(t, string(want), string(got), text)
}

func TestPoliciesAreReadBack(t *testing.T) {
	t.Parallel()
	for _, p := range []ratelimit.Policy{
		ratelimit.PerSecond(10), ratelimit.PerWeek(0.5),
		ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 50},
		ratelimit.TokenBucket{Rate: 1e12, Period: 90 * time.Second, Capacity: ratelimit.None, Shards: 4},
		ratelimit.TokenBucket{Rate: 1e-9, Period: 1500 * time.Millisecond, MaxReserved: ratelimit.None},
		ratelimit.TokenBucket{Rate: 3, Period: 14 * ratelimit.Day, MaxReserved: ratelimit.NoReservations},
		ratelimit.TokenBucket{Rate: 3, Period: 99*365*ratelimit.Day + time.Microsecond, MaxReserved: 0.25},
		ratelimit.FixedWindow{Rate: 100, Period: time.Hour},
		ratelimit.FixedWindow{Rate: 100, Period: time.Hour, Capacity: 5, MaxReserved: 3, Shards: 2, Start: time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC)},
		ratelimit.FixedWindow{Rate: 100, Period: time.Hour},
		ratelimit.SlidingWindow{Rate: 100, Period: time.Minute},
		ratelimit.SlidingWindow{Rate: 100, Period: time.Minute, Slices: 6},
		ratelimit.CalendarWindow{Rate: 1000, Resets: ratelimit.Daily},
		ratelimit.CalendarWindow{Rate: 1000, Resets: ratelimit.Weekly, Zone: "Europe/Berlin", FirstWeekday: time.Monday, MaxReserved: 3},
		ratelimit.CalendarWindow{Rate: 1000, Resets: ratelimit.Monthly, FirstDay: 31},
		ratelimit.CalendarWindow{Rate: 1000, Resets: ratelimit.Quarterly, FirstMonth: time.February, MaxReserved: ratelimit.NoReservations},
		ratelimit.CalendarWindow{Rate: 1000, Resets: ratelimit.Yearly, FirstMonth: time.December, FirstDay: 24},
		ratelimit.Concurrency{Slots: 5},
		ratelimit.Concurrency{Slots: 1000, Lease: 90 * time.Second},
	} {
		requireReadBack(t, p)
	}
}

// TestAnyPolicyIsReadBack promises the same of policies whose fields are random.
func TestAnyPolicyIsReadBack(t *testing.T) {
	t.Parallel()
	testkit.EachSeed(t, func(t *testing.T, seed uint64) {
		random, valid := rand.New(rand.NewPCG(seed, 0)), 0
		try := func(p ratelimit.Policy) {
			if _, err := ratelimit.NewLimit("limit", p); err == nil {
				requireReadBack(t, p)
				valid++
			}
		}
		number := func() float64 { return math.Round(math.Pow(10, random.Float64()*21-9)*1e9) / 1e9 }
		choose := func(values ...float64) float64 { return values[random.IntN(len(values))] }
		span := func() time.Duration { return time.Duration(1+random.Int64N(1<<random.IntN(51))) * time.Microsecond }
		for range testkit.Sized(2000, 100_000) {
			b := ratelimit.TokenBucket{
				Rate: number(), Period: span(), Capacity: choose(0, ratelimit.None, number()),
				MaxReserved: choose(0, ratelimit.None, ratelimit.NoReservations, number()), Shards: 1 << random.IntN(7),
			}
			try(b)
			f := ratelimit.FixedWindow{Rate: b.Rate, Period: b.Period, Capacity: b.Capacity, MaxReserved: b.MaxReserved}
			if random.IntN(2) == 0 {
				f.Start = time.UnixMicro(random.Int64N(1 << 52)).UTC()
			}
			try(f)
			try(ratelimit.Concurrency{Slots: 1 + random.IntN(1000), Lease: span()})
		}
		require.Greater(t, valid, testkit.Sized(500, 25_000))
	})
}

func TestTextsThatPeopleWrite(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]ratelimit.Policy{
		"10 per 1m, capacity 10":       ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 10},
		"1e3 per 7d":                   ratelimit.TokenBucket{Rate: 1000, Period: ratelimit.Week},
		"5 at a time":                  ratelimit.Concurrency{Slots: 5},
		"1000 per year in Asia/Tokyo":  ratelimit.CalendarWindow{Rate: 1000, Resets: ratelimit.Yearly, Zone: "Asia/Tokyo"},
		"never more than 5 in any day": ratelimit.SlidingWindow{Rate: 5, Period: ratelimit.Day},
	} {
		p, err := policytext.Parse(text)
		require.NoError(t, err)
		require.Equal(t, want, p)
	}
	for _, text := range strings.Split(policytext.Examples, "\n") {
		p, err := policytext.Parse(text)
		require.NoError(t, err)
		require.Equal(t, text, p.(interface{ String() string }).String())
	}
	for text, want := range map[string]string{
		"":                                    "this is no policy; write one as",
		"10":                                  "this is no policy",
		"-1 per minute":                       "this is no policy",
		"NaN per minute":                      "this is no policy",
		"10 per minute, burst 5":              "this is no policy",
		"10 per minute capacity 5":            "this is no policy",
		"10 per minute, 4 shards, capacity 5": "this is no policy",
		"5 at a time, capacity 3":             "this is no policy",
		"10 per soon":                         "write a span such as",
		"10 per month":                        "has no fixed length",
		"1e999 per minute":                    "too large",
		"10 per hour (fixed window, one starts at noon)": "no instant",
		"10 per week in UTC from Funday on":              `no "Funday"; write one from Sunday to Saturday`,
		"10 per year in UTC from Smarch 3 on":            `no "Smarch"`,
	} {
		_, err := policytext.Parse(text)
		require.ErrorContains(t, err, want, text)
	}
}

func FuzzParse(f *testing.F) {
	for _, text := range strings.Split(policytext.Examples, "\n") {
		f.Add(text)
	}
	f.Add("1 per day, up to 3 owed, 4 shards")
	f.Fuzz(func(t *testing.T, text string) {
		p, err := policytext.Parse(text)
		if err != nil {
			return
		}
		if _, err := ratelimit.NewLimit("limit", p); err != nil {
			return // its numbers cannot be
		}
		requireReadBack(t, p)
	})
}
