package ratelimit

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

func TestSlidingWindowPolicy(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		policy SlidingWindow
		slices int32
		step   time.Duration
		err    string
	}{
		"AMinute":           {SlidingWindow{Rate: 5, Period: time.Minute}, 60, time.Second, ""},
		"ASecond":           {SlidingWindow{Rate: 5, Period: time.Second}, 50, 20 * time.Millisecond, ""},
		"APrimeNumber":      {SlidingWindow{Rate: 5, Period: 999_983 * time.Microsecond}, 1, 999_983 * time.Microsecond, ""},
		"AMicrosecond":      {SlidingWindow{Rate: 5, Period: time.Microsecond}, 1, time.Microsecond, ""},
		"AHundredYears":     {SlidingWindow{Rate: 5, Period: 36525 * Day}, 60, 36525 * Day / 60, ""},
		"Most":              {SlidingWindow{Rate: 5, Period: 128 * time.Second, Slices: 128}, 128, time.Second, ""},
		"TooMany":           {SlidingWindow{Rate: 5, Period: time.Minute, Slices: 129}, 0, 0, "its Slices is 129; it must be from 1 to 128, or 0 for 60"},
		"Negative":          {SlidingWindow{Rate: 5, Period: time.Minute, Slices: -1}, 0, 0, "its Slices is -1"},
		"NoWholeNumber":     {SlidingWindow{Rate: 5, Period: time.Second, Slices: 60}, 0, 0, "leave out Slices for 50, or set it to a number that divides 1000000"},
		"NoRate":            {SlidingWindow{Period: time.Second}, 0, 0, "its Rate is 0"},
		"NoPeriod":          {SlidingWindow{Rate: 1}, 0, 0, "its Period is 0s"},
		"PartOfMicrosecond": {SlidingWindow{Rate: 1, Period: time.Nanosecond}, 0, 0, "its Period is 1ns"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			limit, err := NewLimit("sliding", test.policy)
			if test.err != "" {
				require.ErrorIs(t, err, ErrInvalidLimit)
				require.ErrorContains(t, err, test.err)
				return
			}
			require.NoError(t, err)
			require.Equal(t, bucket.Sliding{Slices: test.slices}, limit.terms().Kind)
			require.Equal(t, test.step.Microseconds(), limit.terms().Step)
			require.InDelta(t, test.policy.Rate, limit.Capacity(), 0)
			require.False(t, limit.terms().Reserves)
		})
	}
	require.Equal(t, "never more than 5 in any minute", SlidingWindow{Rate: 5, Period: time.Minute}.String())
}

// A story that FixedWindow tells otherwise: the end of one minute and the beginning of the next are in one minute, too.
func TestSlidingWindowValue(t *testing.T) {
	t.Parallel()
	noon := time.Date(2026, 3, 2, 12, 0, 0, 0, time.UTC)
	limit := Define("sliding", SlidingWindow{Rate: 10, Period: time.Minute, Slices: 6})
	v := limit.For("a").Full(noon)
	v, d := v.Take(noon.Add(59*time.Second), 10)
	require.True(t, d.Allowed)
	require.Equal(t, 61*time.Second, d.ResetAfter)
	v, d = v.Take(noon.Add(61*time.Second), 1)
	require.False(t, d.Allowed)
	require.Equal(t, 59*time.Second, d.RetryAfter)
	require.Zero(t, v.At(noon.Add(2*time.Minute-time.Microsecond)))
	require.InDelta(t, 10, v.At(noon.Add(2*time.Minute)), 0)
	wait, err := v.RetryAfter(noon.Add(time.Minute), 3)
	require.NoError(t, err)
	require.Equal(t, time.Minute, wait)
	_, r := v.Reserve(noon.Add(time.Hour), 1)
	require.False(t, r.Allowed, "nothing is reserved of it")
}
