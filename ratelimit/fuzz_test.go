package ratelimit_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// fuzzed returns the policy with those numbers; a start of 0 is none.
func fuzzed(windows bool, rate float64, period int64, capacity, maxReserved float64, start int64) ratelimit.Policy {
	if !windows {
		return ratelimit.TokenBucket{Rate: rate, Period: time.Duration(period), Capacity: capacity, MaxReserved: maxReserved}
	}
	policy := ratelimit.FixedWindow{Rate: rate, Period: time.Duration(period), Capacity: capacity, MaxReserved: maxReserved}
	if start != 0 {
		policy.Start = time.UnixMicro(start)
	}
	return policy
}

// FuzzNewLimit checks the promises of a limit for every policy that NewLimit accepts.
func FuzzNewLimit(f *testing.F) {
	const yearOne, year9999 = int64(-62135596800000000), int64(253402300799999999)
	f.Add("sendMessage", false, 10.0, int64(time.Minute), 3.0, 0.0, int64(0))
	f.Add("a.b/c:d_e-f", true, 100.0, int64(time.Hour), 0.0, ratelimit.NoReservations, int64(1))
	f.Add("tiny", false, 1e-9, int64(time.Microsecond), 1e-9, 1e-9, int64(0))
	f.Add("huge", false, 1e12, int64(century), 1e12, 1e12, int64(0))
	f.Add("slow", true, 1.0, int64(century), 1.0, 1.0, year9999)
	f.Add("late", true, 1.0, int64(7*time.Hour), 1.0, 1.0, int64(7*time.Hour/time.Microsecond)-1)
	f.Add("none", false, 1.0, int64(time.Second), ratelimit.None, 0.0, int64(0))
	f.Add("neither", false, 1.0, int64(time.Second), ratelimit.None, ratelimit.NoReservations, int64(0))
	f.Add("not\x00a name", true, math.NaN(), int64(-1), math.Inf(1), math.Inf(-1), yearOne-1)
	f.Fuzz(func(t *testing.T, name string, windows bool, rate float64, period int64, capacity, maxReserved float64, start int64) {
		limit, err := ratelimit.NewLimit(name, fuzzed(windows, rate, period, capacity, maxReserved, start))
		if err != nil {
			require.ErrorIs(t, err, ratelimit.ErrInvalidLimit)
			require.Equal(t, ratelimit.Limit{}, limit)
			return
		}
		require.True(t, strings.HasPrefix(limit.String(), name+": "))
		require.LessOrEqual(t, limit.Capacity(), 1e12)
		require.GreaterOrEqual(t, limit.Capacity(), 0.0)
		step, longest := time.Microsecond, century
		if windows {
			step, longest = time.Duration(period), century+time.Duration(period)
		}
		full := limit.For("key").Full(opening)
		require.Equal(t, limit.Capacity(), full.Tokens)
		if limit.Capacity() > 0 {
			empties(t, full, longest)
			grows(t, full, step)
		}
	})
}

// empties checks that a bucket gives all it holds, and is full again soon enough.
func empties(t *testing.T, full ratelimit.Value, longest time.Duration) {
	t.Helper()
	empty, d := full.Take(opening, full.Tokens)
	require.True(t, d.Allowed)
	require.Zero(t, empty.Tokens)
	require.Positive(t, d.ResetAfter)
	require.LessOrEqual(t, d.ResetAfter, longest)
	require.Equal(t, full.Tokens, empty.At(opening.Add(d.ResetAfter)))
	smallest := max(full.Tokens*0x1p-40, 1e-9)
	less, d := full.Take(opening, smallest)
	require.True(t, d.Allowed)
	require.Less(t, less.Tokens, full.Tokens, "the smallest cost takes something")
}

// grows checks that rounding never keeps a bucket from growing, however slow its rate is beside its value.
func grows(t *testing.T, full ratelimit.Value, step time.Duration) {
	t.Helper()
	for _, cost := range []float64{full.Tokens, full.Tokens / 2, full.Tokens * 0.01} {
		value, d := full.Take(opening, cost)
		if d.Allowed { // else it is too small a cost
			require.Greater(t, value.At(opening.Add(step)), value.Tokens, "a step adds something to %v", value.Tokens)
		}
	}
}

// FuzzCost checks that a full bucket can give every accepted cost.
func FuzzCost(f *testing.F) {
	f.Add(false, 9.0, int64(time.Minute), 0.0, 3.0)
	f.Add(false, 10.0, int64(time.Second), ratelimit.None, 0.5)
	f.Add(false, 1e12, int64(century), 1.0, 1.0)
	f.Add(false, 1.0, int64(time.Second), 0.1, math.Nextafter(0.1, 0))
	f.Add(true, 7.0, int64(time.Hour), 21.0, 21.0)
	f.Fuzz(func(t *testing.T, windows bool, rate float64, period int64, capacity, cost float64) {
		limit, err := ratelimit.NewLimit("fuzz", fuzzed(windows, rate, period, capacity, 0, 0))
		if err != nil {
			return
		}
		full := limit.For("key").Full(opening)
		after, d := full.Take(opening, cost)
		_, err = full.RetryAfter(opening, cost)
		require.Equal(t, err == nil, d.Allowed, "what is no error is allowed at least when the bucket is full")
		if err != nil {
			require.Equal(t, full, after)
		}
	})
}

// errSent is what a keyRecorder answers.
var errSent = errors.New("sent")

// keyRecorder is a transaction that records the key that a Take sends, in a database without a stored secret.
type keyRecorder struct {
	untouched
	key string
}

func (r *keyRecorder) Query(_ context.Context, _ string, args ...any) (pgx.Rows, error) {
	if len(args) == 2 { // for the fingerprint
		return noRows{}, nil
	}
	r.key = args[1].(string)
	return nil, errSent
}

type noRows struct{ pgx.Rows }

func (noRows) Next() bool { return false }
func (noRows) Err() error { return nil }
func (noRows) Close()     {}

func (noRows) CommandTag() (tag pgconn.CommandTag) { return tag }

// FuzzKey checks that the table can store every accepted key.
func FuzzKey(f *testing.F) {
	for _, key := range []string{"", "a", " a ", "A", "\x00", "a\x00b", "\xff", "é", strings.Repeat("x", 256), strings.Repeat("x", 257), strings.Repeat("é", 128)} {
		f.Add(key)
	}
	limit := ratelimit.Define("fuzz", ratelimit.PerSecond(1))
	f.Fuzz(func(t *testing.T, key string) {
		sent := func(config ratelimit.Config) (string, error) {
			tx := &keyRecorder{untouched: untouched{t: t}}
			limiter, err := ratelimit.New(tx, config)
			require.NoError(t, err)
			if _, err = limiter.WithTx(tx).Take(t.Context(), limit.For(key)); errors.Is(err, errSent) {
				err = nil
			}
			return tx.key, err
		}
		plain, err := sent(ratelimit.Config{})
		if err != nil {
			require.ErrorIs(t, err, ratelimit.ErrInvalidKey)
			require.Empty(t, plain)
		} else {
			require.Equal(t, key, plain)
			require.True(t, len(plain) >= 1 && len(plain) <= 256 && utf8.ValidString(plain) && !strings.Contains(plain, "\x00"))
		}
		hashed, err := sent(ratelimit.Config{HashKey: []byte("0123456789abcdef")})
		if err != nil {
			require.ErrorIs(t, err, ratelimit.ErrInvalidKey)
			require.True(t, key == "" || len(key) > 1<<16)
			return
		}
		require.Regexp(t, `^[A-Za-z0-9_-]{43}$`, hashed)
		require.NotEqual(t, key, hashed)
	})
}

// FuzzSchema checks that every accepted schema is safe in a statement.
func FuzzSchema(f *testing.F) {
	for _, schema := range []string{"", "ratelimit", "_a1", "Upper", "a;b", "a\"b", "ä", "a.b", strings.Repeat("s", 63), strings.Repeat("s", 64), "a\x00", "a\n"} {
		f.Add(schema)
	}
	f.Fuzz(func(t *testing.T, schema string) {
		limiter, err := ratelimit.New(untouched{t: t}, ratelimit.Config{Schema: schema})
		if err != nil {
			require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
			return
		}
		if schema == "" {
			schema = "ratelimit"
		}
		require.Equal(t, schema, limiter.Schema())
		require.LessOrEqual(t, len(schema), 63)
		require.Empty(t, strings.Trim(schema, "abcdefghijklmnopqrstuvwxyz0123456789_"))
	})
}
