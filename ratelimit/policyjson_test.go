package ratelimit_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/strictjson"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// written is a policy as text and as JSON.
type written struct {
	policy     ratelimit.Policy
	says, json string
}

// writtenPolicies are of every kind.
func writtenPolicies() []written {
	start := time.Date(2026, 1, 31, 15, 4, 5, 678_000, time.UTC)
	bucket := tokens{Rate: 10, Period: time.Minute}
	return []written{
		{bucket, "10 per minute", `{"kind":"token bucket","rate":10,"period":"1m"}`},
		{
			tokens{Rate: 0.5, Period: ratelimit.Day, Capacity: 50, MaxReserved: 7, Shards: 4},
			"0.5 per day, capacity 50, up to 7 owed, 4 shards",
			`{"kind":"token bucket","rate":0.5,"period":"24h","capacity":50,"max_reserved":7,"shards":4}`,
		},
		{tokens{Rate: 9, Period: second, Capacity: none}, "9 per second, no capacity", `{"kind":"token bucket","rate":9,"period":"1s","capacity":0}`},
		{tokens{Rate: 9, Period: second, MaxReserved: none}, "9 per second, no debt", `{"kind":"token bucket","rate":9,"period":"1s","max_reserved":0}`},
		{
			tokens{Rate: 9, Period: second, MaxReserved: ratelimit.NoReservations},
			"9 per second, no reservations",
			`{"kind":"token bucket","rate":9,"period":"1s","max_reserved":"forbidden"}`,
		},
		{
			windows{Rate: 5, Period: time.Hour, Capacity: 6, Start: start},
			"5 per hour, capacity 6 (fixed window, one starts at 2026-01-31T15:04:05.000678Z)",
			`{"kind":"fixed window","rate":5,"period":"1h","capacity":6,"start":"2026-01-31T15:04:05.000678Z"}`,
		},
		{
			sliding{Rate: 100, Period: time.Minute, Slices: 30},
			"never more than 100 in any minute, counted in 30 slices",
			`{"kind":"sliding window","rate":100,"period":"1m","slices":30}`,
		},
		{
			calendar{Rate: 5, Resets: ratelimit.Weekly, Zone: "Europe/Berlin", FirstWeekday: time.Monday},
			"5 per week in Europe/Berlin from Monday on",
			`{"kind":"calendar window","rate":5,"resets":"week","zone":"Europe/Berlin","first_weekday":"monday"}`,
		},
		{
			calendar{Rate: 7, Resets: ratelimit.Monthly, FirstDay: 31},
			"7 per month in UTC from day 31 on",
			`{"kind":"calendar window","rate":7,"resets":"month","first_day":31}`,
		},
		{
			calendar{Rate: 9, Resets: ratelimit.Yearly, FirstDay: 31, FirstMonth: time.April, MaxReserved: 1},
			"9 per year in UTC from April 31 on, up to 1 owed",
			`{"kind":"calendar window","rate":9,"resets":"year","first_day":31,"first_month":"april","max_reserved":1}`,
		},
		{slots{Slots: 5}, "5 at a time, leases of 1m", `{"kind":"concurrency","slots":5}`},
		{slots{Slots: 5, Lease: 30 * second}, "5 at a time, leases of 30s", `{"kind":"concurrency","slots":5,"lease":"30s"}`},
	}
}

func TestPoliciesAreWrittenAndRead(t *testing.T) {
	t.Parallel()
	for _, w := range writtenPolicies() {
		limit := ratelimit.Define("x", w.policy)
		require.Equal(t, "x: "+w.says, limit.String())
		require.Equal(t, w.policy, limit.Policy())
		text, err := ratelimit.MarshalPolicy(w.policy)
		require.NoError(t, err)
		require.Equal(t, w.json, string(text))
		read, err := ratelimit.UnmarshalPolicy([]byte(w.json))
		require.NoError(t, err)
		require.Equal(t, w.policy, read)
	}
	require.Equal(t, "undefined limit", ratelimit.Limit{}.String())
	limit := ratelimit.Define("x", ratelimit.PerMinute(10))
	require.Equal(t, "1 of x", limit.For(secret).String(), "a request does not show its key")
	require.Equal(t, "2.5 of x", limit.Global().Cost(2.5).String())
	require.Equal(t, limit, limit.For(secret).Limit())
	for want, policy := range map[string]ratelimit.Policy{
		"7 per second": ratelimit.PerSecond(7), "7 per hour": ratelimit.PerHour(7), "7 per day": ratelimit.PerDay(7), "7 per week": ratelimit.PerWeek(7),
		"7 per quarter in UTC": calendar{Rate: 7, Resets: ratelimit.Quarterly, FirstMonth: time.January, FirstDay: 1}, // as by default
	} {
		require.Equal(t, want, policy.String())
	}
	written, err := ratelimit.MarshalPolicy(ratelimit.CalendarWindow{
		Rate: 3, Resets: ratelimit.Yearly, Zone: "UTC", FirstDay: 1, FirstMonth: time.January, MaxReserved: 3,
	})
	require.NoError(t, err)
	require.JSONEq(t, `{"kind": "calendar window", "rate": 3, "resets": "year"}`, string(written), "what is the default is left out")
	read, err := ratelimit.UnmarshalPolicy([]byte(` {"rate": 10, "period": "minute", "capacity": null} `))
	require.NoError(t, err, "spaces, no kind, a word for a period, and null for the default")
	require.Equal(t, ratelimit.PerMinute(10), read)
}

// FuzzPolicyText promises a round trip: MarshalPolicy writes each policy that UnmarshalPolicy accepts. Reading that
// text gives a policy with the same decisions and the same text.
func FuzzPolicyText(f *testing.F) {
	for _, w := range writtenPolicies() {
		f.Add([]byte(w.json))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		policy, err := ratelimit.UnmarshalPolicy(text)
		if err != nil {
			require.ErrorIs(t, err, ratelimit.ErrInvalidLimit)
			return
		}
		written, err := ratelimit.MarshalPolicy(policy)
		require.NoError(t, err)
		again, err := ratelimit.UnmarshalPolicy(written)
		require.NoError(t, err)
		require.Equal(t, ratelimit.Define("a", policy).Spec(), ratelimit.Define("a", again).Spec())
		require.Equal(t, policy.String(), again.String())
		rewritten, err := ratelimit.MarshalPolicy(again)
		require.NoError(t, err)
		require.Equal(t, string(written), string(rewritten))
	})
}

// TestErrorsOfPoliciesNameTheFieldAndAValidValue promises that nothing is passed over, and that an error of a field
// names it.
func TestErrorsOfPoliciesNameTheFieldAndAValidValue(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]struct{ field, problem string }{
		`{"kind":"sliding window","rate":1,"period":"1m","capacity":5}`:                 {"capacity", "is no field of a sliding window; there are kind, rate, period, slices"},
		`{"rate":1,"period":"1m","burst":5}`:                                            {"burst", "is no field of a token bucket; there are kind, rate, period, capacity"},
		`{"Rate":1,"period":"1m"}`:                                                      {"Rate", "is no field"},
		`{"rate":1,"rate":2,"period":"1m"}`:                                             {"rate", "is given twice"},
		`{"kind":"leaky","rate":1,"period":"1m"}`:                                       {"kind", `is "leaky"; use one of token bucket, fixed window`},
		`{"rate":1,"period":"fortnight"}`:                                               {"period", `is "fortnight"; write a duration such as 90s`},
		`{"rate":1,"period":"month"}`:                                                   {"period", "use a calendar window that resets each month"},
		`{"rate":1,"period":60}`:                                                        {"period", "is 60; write a duration such as 90s"},
		`{"rate":"1","period":"1m"}`:                                                    {"rate", `is "1"; write a number`},
		`{"rate":1,"period":"1m","shards":1.5}`:                                         {"shards", "is 1.5; write a whole number"},
		`{"rate":1,"period":"1m","capacity":-1}`:                                        {"capacity", "write a number above 0, or 0 for none"},
		`{"rate":1,"period":"1m","max_reserved":-1}`:                                    {"max_reserved", "or 0 to reserve only available tokens"},
		`{"kind":"fixed window","rate":1,"period":"1m","start":"2026-01-31"}`:           {"start", "write a time such as"},
		`{"kind":"calendar window","rate":1,"resets":"week","first_weekday":"friyday"}`: {"first_weekday", `is "friyday"; use one of sunday`},
		`{"kind":"calendar window","rate":1,"resets":"year","first_month":4}`:           {"first_month", "use one of january"},
		`{"kind":"calendar window","rate":1,"resets":"day","zone":"Europe/Atlantis"}`:   {"", `no time zone "Europe/Atlantis"`},
		`{"kind":"calendar window","rate":1}`:                                           {"", "its Resets is not set"},
		`{"kind":"calendar window","rate":1,"resets":"hour"}`:                           {"", `its Resets is "hour"; use Daily`},
		`{"period":"1m"}`: {"", "its Rate is 0"},
		`[]`:              {"", "it is not an object"},
		`{"rate":1}`:      {"period", "is missing"},
		`{"rate":1`:       {"", "the object does not end"},
		`{} {}`:           {"", "there is more after the object"},
	} {
		_, err := ratelimit.UnmarshalPolicy([]byte(text))
		require.ErrorIs(t, err, ratelimit.ErrInvalidLimit, text)
		require.ErrorContains(t, err, want.problem, text)
		fault, ok := errors.AsType[*strictjson.Error](err)
		require.Equal(t, want.field != "", ok, text)
		if ok {
			require.Equal(t, want.field, fault.Field)
		}
	}
	for _, policy := range []ratelimit.Policy{nil, ratelimit.PerMinute(-1)} {
		_, err := ratelimit.MarshalPolicy(policy)
		require.ErrorIs(t, err, ratelimit.ErrInvalidLimit)
	}
	wrapped, err := ratelimit.MarshalPolicy(struct{ ratelimit.Policy }{ratelimit.PerMinute(1)})
	require.NoError(t, err)
	require.JSONEq(t, `{"kind":"token bucket","rate":1,"period":"1m"}`, string(wrapped))
}

func TestNumbersOfEveryKind(t *testing.T) {
	t.Parallel()
	for want, policy := range map[ratelimit.Spec]ratelimit.Policy{
		{Kind: "token bucket", Capacity: 50, Rate: 10, Period: time.Minute, MaxDebt: 7, Shards: 4}: ratelimit.TokenBucket{
			Rate: 10, Period: time.Minute, Capacity: 50, MaxReserved: 7, Shards: 4,
		},
		{Kind: "token bucket", Capacity: 0, Rate: 10, Period: time.Minute, MaxDebt: 7, Shards: 1}: ratelimit.TokenBucket{
			Rate: 10, Period: time.Minute, Capacity: ratelimit.None, MaxReserved: 7,
		},
		{Kind: "fixed window", Capacity: 5, Rate: 5, Period: time.Hour, Shards: 1}:                                               ratelimit.FixedWindow{Rate: 5, Period: time.Hour, MaxReserved: ratelimit.None},
		{Kind: "sliding window", Capacity: 5, Rate: 5, Period: time.Hour, Shards: 1}:                                             ratelimit.SlidingWindow{Rate: 5, Period: time.Hour},
		{Kind: "calendar window", Capacity: 5, Rate: 5, Period: ratelimit.Week, Resets: ratelimit.Weekly, MaxDebt: 5, Shards: 1}: ratelimit.CalendarWindow{Rate: 5, Resets: ratelimit.Weekly},
		{Kind: "concurrency", Capacity: 5, Rate: 5, Period: time.Minute, Shards: 1}:                                              ratelimit.Concurrency{Slots: 5},
	} {
		require.Equal(t, want, ratelimit.Define("a", policy).Spec())
	}
	for most, policy := range map[float64]ratelimit.Policy{ // owed by default: the tokens of a century, or the most that is possible
		36525 * 86400:   ratelimit.PerSecond(1),
		36525 * 0.5:     ratelimit.PerDay(0.5),
		1e12:            ratelimit.PerSecond(1e9),
		36525 * 3.0 / 7: ratelimit.TokenBucket{Rate: 3, Period: ratelimit.Week, Capacity: ratelimit.None},
		36525 * 48:      ratelimit.FixedWindow{Rate: 2, Period: time.Hour, Capacity: 7},
	} {
		require.InEpsilon(t, most, ratelimit.Define("a", policy).Spec().MaxDebt, 1e-12)
	}
	require.Zero(t, ratelimit.Limit{}.Spec())
}

// TestScaledPoliciesStayValid promises one factor for all numbers of a policy, and one token.
func TestScaledPoliciesStayValid(t *testing.T) {
	t.Parallel()
	minute := time.Minute
	for _, test := range []struct {
		policy ratelimit.Policy
		times  float64
		want   ratelimit.Policy
	}{
		{ratelimit.TokenBucket{Rate: 10, Period: minute, Capacity: 4, MaxReserved: 2}, 2.5, ratelimit.TokenBucket{Rate: 25, Period: minute, Capacity: 10, MaxReserved: 5}},
		{ratelimit.FixedWindow{Rate: 10, Period: minute, MaxReserved: ratelimit.None}, 2, ratelimit.FixedWindow{Rate: 20, Period: minute, MaxReserved: ratelimit.None}},
		{ratelimit.SlidingWindow{Rate: 10, Period: minute}, 0.1, ratelimit.SlidingWindow{Rate: 1, Period: minute}},
		{ratelimit.CalendarWindow{Rate: 10, Resets: ratelimit.Daily}, 3, ratelimit.CalendarWindow{Rate: 30, Resets: ratelimit.Daily}},
		{ratelimit.Concurrency{Slots: 5}, 1.5, ratelimit.Concurrency{Slots: 7}},
		{ratelimit.Concurrency{Slots: 5}, 0.1, ratelimit.Concurrency{Slots: 1}},
		{ratelimit.Concurrency{Slots: 5}, 1e6, ratelimit.Concurrency{Slots: 1000}},
		{ratelimit.TokenBucket{Rate: 1e10, Period: minute, Capacity: 1e11}, 1e6, ratelimit.TokenBucket{Rate: 1e11, Period: minute, Capacity: 1e12}},
		{ratelimit.TokenBucket{Rate: 10, Period: minute, Capacity: ratelimit.None}, 2, ratelimit.TokenBucket{Rate: 20, Period: minute, Capacity: ratelimit.None}},
		{ratelimit.FixedWindow{Rate: 1, Period: minute, Start: time.Unix(7, 0), Shards: 2}, 2, ratelimit.FixedWindow{Rate: 2, Period: minute, Start: time.Unix(7, 0), Shards: 2}},
		{ratelimit.TokenBucket{Rate: 1e-7, Period: minute}, 1e-6, ratelimit.TokenBucket{Rate: 1e-9, Period: minute, Capacity: 1e-7}},
		{ratelimit.TokenBucket{Rate: 5, Period: minute}, 0.1, ratelimit.TokenBucket{Rate: 0.5, Period: minute, Capacity: 1}},
		{ratelimit.TokenBucket{Rate: 60, Period: minute, Capacity: 4, Shards: 2}, 0.1, ratelimit.TokenBucket{Rate: 6, Period: minute, Capacity: 1, Shards: 2}},
		{ratelimit.TokenBucket{Rate: 0.5, Period: minute}, 0.1, ratelimit.TokenBucket{Rate: 0.05, Period: minute, Capacity: 0.5}},
		{ratelimit.FixedWindow{Rate: 5, Period: minute}, 0.1, ratelimit.FixedWindow{Rate: 0.5, Period: minute, Capacity: 1}},
		{ratelimit.SlidingWindow{Rate: 5, Period: minute}, 0.1, ratelimit.SlidingWindow{Rate: 1, Period: minute}},
		{ratelimit.CalendarWindow{Rate: 5, Resets: ratelimit.Daily}, 0.1, ratelimit.CalendarWindow{Rate: 1, Resets: ratelimit.Daily}},
		{ratelimit.CalendarWindow{Rate: 0.5, Resets: ratelimit.Daily}, 0.1, ratelimit.CalendarWindow{Rate: 0.5, Resets: ratelimit.Daily}},
		{
			ratelimit.TokenBucket{Rate: 60, Period: minute, Capacity: ratelimit.None, MaxReserved: 5},
			0.1,
			ratelimit.TokenBucket{Rate: 6, Period: minute, Capacity: ratelimit.None, MaxReserved: 1},
		},
		{
			ratelimit.TokenBucket{Rate: 0.5, Period: minute, Capacity: ratelimit.None},
			0.1,
			ratelimit.TokenBucket{Rate: 0.05, Period: minute, Capacity: ratelimit.None},
		},
	} {
		require.Equal(t, test.want, ratelimit.Scale(test.policy, test.times))
	}
}
