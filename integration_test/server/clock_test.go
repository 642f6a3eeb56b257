//go:build unix

package server_test

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// clock is a file with the seconds that a server's clock is ahead of the machine's.
type clock string

// set moves the clock. The file is put in place as a whole, because the server reads it at each look at its clock.
func (c clock) set(t *testing.T, ahead time.Duration) {
	t.Helper()
	next := string(c) + ".next"
	require.NoError(t, os.WriteFile(next, fmt.Appendf(nil, "%+.6f", ahead.Seconds()), 0o644))
	require.NoError(t, os.Rename(next, string(c)))
}

// startClocked starts a server whose clock the test sets. Its timers go by the monotonic clock, which stays.
func startClocked(t *testing.T) (*application, clock) {
	t.Helper()
	var libraries []string
	for _, pattern := range []string{"/usr/lib/*/faketime", "/usr/lib/faketime", "/usr/lib64/faketime", "/usr/local/lib/faketime"} {
		found, err := filepath.Glob(pattern + "/libfaketime.so.1")
		require.NoError(t, err)
		libraries = append(libraries, found...)
	}
	if len(libraries) == 0 {
		postgrestest.GiveUp(t, fmt.Errorf("%w: its clock is moved by libfaketime: apt-get install faketime", postgrestest.ErrNoServer))
	}
	directory := t.TempDir()
	require.NoError(t, os.Chmod(filepath.Dir(directory), 0o755)) // the server's user reads it
	c := clock(filepath.Join(directory, "offset"))
	c.set(t, 0)
	_, a := startServer(t, postgrestest.Options{Env: []string{
		"LD_PRELOAD=" + libraries[0], "FAKETIME_TIMESTAMP_FILE=" + string(c), "FAKETIME_NO_CACHE=1",
		"FAKETIME_DONT_FAKE_MONOTONIC=1",
	}})
	return a, c
}

// stepped are the limits whose clock is set: the time that a test takes brings none of them a token.
type stepped struct {
	limit ratelimit.Limit
	still time.Duration // the longest that a step back makes it stand still
	usual time.Duration // the longest that it takes to get one again, when no clock steps
}

// steppedLimits returns a limit of ten of each kind. Windows begin ten hours before and after now.
func steppedLimits(now time.Time) map[string]stepped {
	const period = 20 * time.Hour
	return map[string]stepped{
		"bucket":  {ratelimit.Define("bucket", ratelimit.TokenBucket{Rate: 10, Period: period}), time.Minute, period / 10},
		"window":  {ratelimit.Define("window", ratelimit.FixedWindow{Rate: 10, Period: period, Start: now.Add(-period / 2)}), period + time.Minute, period},
		"sliding": {ratelimit.Define("sliding", ratelimit.SlidingWindow{Rate: 10, Period: period, Slices: 20}), time.Hour + time.Minute, period + time.Hour},
		"slots":   {ratelimit.Define("longSlots", ratelimit.Concurrency{Slots: 10, Lease: 12 * time.Hour}), time.Minute, 12 * time.Hour},
	}
}

// drain takes one after the other from the limit until it is refused, and returns how many it was given.
func (a *application) drain(t *testing.T, s stepped, key string, inTx bool) (given int) {
	t.Helper()
	take := func(l *ratelimit.Limiter) (d ratelimit.Decision, err error) {
		if s.limit.Name() == "longSlots" {
			lease, err := l.Acquire(t.Context(), s.limit.For(key))
			return lease.Decision, err
		}
		return l.Take(t.Context(), s.limit.For(key))
	}
	for ; given < 50; given++ {
		var d ratelimit.Decision
		var err error
		if inTx {
			err = a.Limiter.InTx(t.Context(), func(tx pgx.Tx) (err error) {
				d, err = take(a.Limiter.WithTx(tx))
				return err
			})
		} else {
			d, err = take(a.Limiter)
		}
		require.NoError(t, err)
		if !d.Allowed {
			require.LessOrEqual(t, d.RetryAfter, s.still+s.usual, "%s does not stand still for longer", s.limit.Name())
			return given
		}
	}
	return given
}

// The clock of a server steps while it runs. A step forward brings each limit its capacity at most. A step back brings
// nothing by itself, but a window can be repeated. None stands still for longer than is promised.
func TestAServersClockSteps(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "servers of its own")
	a, clock := startClocked(t)
	type given = map[string]int // of each kind; 0 of the others
	whole := given{"bucket": 10, "window": 10, "sliding": 10, "slots": 10}
	limits := steppedLimits(one[time.Time](t, a.Pool, `SELECT clock_timestamp()`))
	for i, step := range []struct {
		ahead time.Duration
		given given
	}{
		{0, whole},
		{-30 * time.Second, nil},
		{0, nil},
		{-time.Hour, nil},
		{0, nil}, // the hour that passes again brings the bucket half a token
		{ratelimit.Day, whole},
		{0, nil},
		{150 * time.Minute, given{"bucket": 1}}, // it counts from the step back on, and does not wait for tomorrow
		// 5.5 tokens have come; a window that was already used up repeats; leases end within their length
		{13 * time.Hour, given{"bucket": 5, "window": 10, "slots": 10}},
		{1350 * time.Minute, given{"bucket": 5, "sliding": 10}}, // 4.75 more, and the half; a window that slides, within its period
		{31 * time.Hour, given{"bucket": 4, "window": 10, "slots": 10}},
	} {
		clock.set(t, step.ahead)
		for kind, s := range limits {
			for _, inTx := range []bool{false, true} {
				require.Equal(t, step.given[kind], a.drain(t, s, fmt.Sprint(inTx), inTx), "step %d, to %v, %s, in a transaction: %v", i, step.ahead, kind, inTx)
			}
		}
	}
}

// A call waits for a row for days, and the transaction that holds the row takes from it at the beginning and at the
// end. The call began long before the row's ts, but must not treat that ts as a wrong clock. The tokens that arrived
// between the two takes count once.
func TestALongWaitCreditsNoTimeTwice(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "servers of its own")
	a, clock := startClocked(t)
	const capacity, wait = 10, 41 * time.Hour // which fills every limit, and is two windows long
	beside := ratelimit.Define("beside", ratelimit.TokenBucket{Rate: 1000, Period: time.Second})
	var began time.Time
	type call func(ctx context.Context, l *ratelimit.Limiter, r ratelimit.Request) error
	acquire := func(ctx context.Context, l *ratelimit.Limiter, r ratelimit.Request) error {
		lease, err := l.Acquire(ctx, r)
		return cmp.Or(err, lease.Err())
	}
	take := func(ctx context.Context, l *ratelimit.Limiter, r ratelimit.Request) error { return l.Require(ctx, r) }
	calls := map[string]call{
		"Take": take,
		"Several": func(ctx context.Context, l *ratelimit.Limiter, r ratelimit.Request) error {
			return l.Require(ctx, r, beside.For("all"))
		},
		"Charge": func(ctx context.Context, l *ratelimit.Limiter, r ratelimit.Request) error { return l.Charge(ctx, r) },
		"CreditTaken": func(ctx context.Context, l *ratelimit.Limiter, r ratelimit.Request) error {
			return l.CreditTaken(ctx, began, r)
		},
	}
	ahead := time.Duration(0)
	for kind, s := range steppedLimits(one[time.Time](t, a.Pool, `SELECT clock_timestamp()`)) {
		hold, ways := take, calls
		if kind == "slots" {
			hold, ways = acquire, map[string]call{"Acquire": acquire}
		}
		for way, call := range ways {
			for _, level := range []pgx.TxIsoLevel{"", pgx.ReadCommitted, pgx.Serializable} {
				t.Run(fmt.Sprint(kind, "/", way, "/", level), func(t *testing.T) { // one after the other: they share the clock
					request := s.limit.For(t.Name())
					began = one[time.Time](t, a.Pool, `SELECT clock_timestamp()`)
					holder, err := a.Pool.Begin(t.Context())
					require.NoError(t, err)
					require.NoError(t, hold(t.Context(), a.Limiter.WithTx(holder), request))
					waited := make(chan error, 1)
					go func() {
						waited <- a.at(t.Context(), level, func(l *ratelimit.Limiter) error { return call(t.Context(), l, request) })
					}()
					world.Eventually(t, "the call waits for the row", func() bool {
						return a.Count(t, `SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'`) == 1
					})
					ahead += wait
					clock.set(t, ahead)
					require.NoError(t, hold(t.Context(), a.Limiter.WithTx(holder), request))
					require.NoError(t, holder.Commit(t.Context()))
					require.NoError(t, <-waited)
					left := capacity - 2
					switch {
					case way == "CreditTaken" && kind == "bucket":
						left = capacity
					case way == "CreditTaken": // of a window that has ended meanwhile
						left = capacity - 1
					}
					require.Equal(t, left, a.drain(t, s, t.Name(), false))
				})
			}
		}
	}
}

// at runs call in a transaction of the isolation level, which is made again after a conflict, or in none.
func (a *application) at(ctx context.Context, level pgx.TxIsoLevel, call func(*ratelimit.Limiter) error) error {
	if level == "" {
		return call(a.Limiter)
	}
	for {
		err := pgx.BeginTxFunc(ctx, a.Pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error { return call(a.Limiter.WithTx(tx)) })
		if sqlstate(err) != "40001" {
			return err
		}
	}
}
