package words_test

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/words"
)

const day = 24 * time.Hour

func TestRatesAreWrittenInWords(t *testing.T) {
	t.Parallel()
	for want, got := range map[string]string{
		"60 per minute":                words.Rate(60, time.Minute),
		"0.5 per second":               words.Rate(0.5, time.Second),
		"7 per hour":                   words.Rate(7, time.Hour),
		"7 per day":                    words.Rate(7, day),
		"7 per week":                   words.Rate(7, 7*day),
		"1 per 2 weeks":                words.Rate(1, 14*day),
		"1 per 30 days":                words.Rate(1, 30*day),
		"1000000000000 per 90 minutes": words.Rate(1e12, 90*time.Minute),
		"5 per 30 seconds":             words.Rate(5, 30*time.Second),
		"5 per 100ms":                  words.Rate(5, 100*time.Millisecond),
		"0.000000001 per 1.5s":         words.Rate(1e-9, 1500*time.Millisecond),
		"100 in any minute":            words.InAny(100, time.Minute),
		"100 in any 10 seconds":        words.InAny(100, 10*time.Second),
	} {
		require.Equal(t, want, got)
	}
}

func TestSpansAreWrittenShort(t *testing.T) {
	t.Parallel()
	for want, d := range map[string]time.Duration{
		"0s": 0, "1m": time.Minute, "1h": time.Hour, "1h30m": 90 * time.Minute, "10m": 10 * time.Minute,
		"1m30s": 90 * time.Second, "24h": day, "20s": 20 * time.Second, "1h0m1s": time.Hour + time.Second,
	} {
		require.Equal(t, want, words.Span(d))
	}
}

// TestWaitsAreNeverTooShort promises that a written wait is never shorter than the real one.
func TestWaitsAreNeverTooShort(t *testing.T) {
	t.Parallel()
	for want, d := range map[string]time.Duration{
		"0s": 0, "1ms": time.Microsecond, "3s": 3 * time.Second, "29.999s": 29_998_500 * time.Microsecond,
		"1m": time.Minute - time.Microsecond,
	} {
		require.Equal(t, want, words.Wait(d))
	}
	require.Equal(t, time.Duration(math.MaxInt64).String(), words.Wait(math.MaxInt64))
}

// TestSpansAreParsed promises that a span of every unit is read, and that no other text is taken for one.
func TestSpansAreParsed(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]time.Duration{
		"second": time.Second, "minute": time.Minute, "hour": time.Hour, "day": day, "week": 7 * day, "7d": 7 * day, "1.5d": 36 * time.Hour,
		"2w": 14 * day, "90s": 90 * time.Second, "1h30m": 90 * time.Minute, "40000d": 40_000 * day,
		"7 days": 7 * day, "90 seconds": 90 * time.Second, "40000 days": 40_000 * day, "2880000000000001µs": 2_880_000_000_000_001 * time.Microsecond,
	} {
		d, err := words.ParseSpan(text)
		require.NoError(t, err, text)
		require.Equal(t, want, d, text)
	}
	for text, want := range map[string]string{
		"": "write a duration", "60": "write a duration", "0s": "write a duration", "-1d": "write a duration", "NaNd": "write a duration", "fortnight": "write a duration",
		"d": "write a duration", "month": "has no fixed length", "40001d": "up to 40000 days", "1000000h": "up to 40000 days", "Infw": "up to 40000 days",
		"-7 days": "write a duration", "1.5 days": "write a duration", "4000000 days": "up to 40000 days", "99999999999 seconds": "write a duration",
	} {
		_, err := words.ParseSpan(text)
		require.ErrorContains(t, err, want, text)
	}
}

// FuzzSpan checks the bounds of spans, and that a span in the format of package time keeps its value.
func FuzzSpan(f *testing.F) {
	for _, text := range []string{"", "0s", "90s", "1h30m", "7d", "2w", "minute", "week", "NaNd", "-1d", "0x1p3d", "40001d", "1e-9w", "d", "9223372036854775807ns"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		span, err := words.ParseSpan(text)
		if err != nil {
			return
		}
		require.True(t, span > 0 && span <= 40_000*day, "%v", span)
		again, err := words.ParseSpan(span.String())
		require.NoError(t, err)
		require.Equal(t, span, again)
	})
}
