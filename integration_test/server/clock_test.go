//go:build unix

package server_test

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// startClocked starts a server whose clock the test sets.
func startClocked(t *testing.T) (*postgrestest.Server, *application, *postgrestest.Clock) {
	t.Helper()
	clock := postgrestest.NewClock(t)
	server, a := startServer(t, postgrestest.Options{Env: clock.Env()})
	return server, a, clock
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
		"slots":   {ratelimit.Define("longSlots", ratelimit.Concurrency{Most: 10, Lease: 12 * time.Hour}), time.Minute, 12 * time.Hour},
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
			err = a.limiter.InTx(t.Context(), func(tx pgx.Tx) (err error) {
				d, err = take(a.limiter.WithTx(tx))
				return err
			})
		} else {
			d, err = take(a.limiter)
		}
		require.NoError(t, err)
		if !d.Allowed {
			require.LessOrEqual(t, d.RetryAfter, s.still+s.usual, "%s does not stand still for longer", s.limit.Name())
			return given
		}
	}
	return given
}

// The clock of a server steps while it runs. A step forward brings each limit its capacity at most, a step back nothing, and
// none stands still for longer than is promised.
func TestAServersClockSteps(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "servers of its own")
	_, a, clock := startClocked(t)
	none := map[string]int{"bucket": 0, "window": 0, "sliding": 0, "slots": 0}
	but := func(changes map[string]int) map[string]int {
		all := maps.Clone(none)
		maps.Copy(all, changes)
		return all
	}
	whole := map[string]int{"bucket": 10, "window": 10, "sliding": 10, "slots": 10}
	limits := steppedLimits(one[time.Time](t, a.pool, `SELECT clock_timestamp()`))
	for i, step := range []struct {
		ahead time.Duration
		given map[string]int
	}{
		{0, whole},
		{-30 * time.Second, none},
		{0, none},
		{-time.Hour, none},
		{0, none}, // the hour that passes again brings the bucket half a token
		{ratelimit.Day, whole},
		{0, none},
		{150 * time.Minute, but(map[string]int{"bucket": 1})},                 // it counts from the step back on, and does not wait for tomorrow
		{13 * time.Hour, but(map[string]int{"bucket": 5, "slots": 10})},       // 5.5 tokens have come; leases end within their length
		{1350 * time.Minute, but(map[string]int{"bucket": 5, "sliding": 10})}, // 4.75 more, and the half; a window that slides, within its period
		{31 * time.Hour, but(map[string]int{"bucket": 4, "window": 10, "slots": 10})},
	} {
		clock.Set(t, step.ahead)
		for kind, s := range limits {
			for _, inTx := range []bool{false, true} {
				require.Equal(t, step.given[kind], a.drain(t, s, fmt.Sprint(inTx), inTx), "step %d, to %v, %s, in a transaction: %v", i, step.ahead, kind, inTx)
			}
		}
	}
}

// steady gains a thousand tokens a second, and is never full or empty while a test runs.
var steady = ratelimit.Define("steady", ratelimit.TokenBucket{Rate: 1000, Period: time.Second, Capacity: 1e9})

// bucket is the row of the bucket of "key".
type bucket struct {
	value float64
	ts    int64
}

func (a *application) bucket(t *testing.T, limit ratelimit.Limit) (b bucket) {
	t.Helper()
	require.NoError(t, a.pool.QueryRow(t.Context(), `SELECT value, ts FROM ratelimit.buckets WHERE name = $1 AND key = 'key'`, limit.Name()).Scan(&b.value, &b.ts))
	return b
}

// requireExactRefill checks that from one row of steady to a later one every instant was credited once.
func requireExactRefill(t *testing.T, before, after bucket, taken int) {
	t.Helper()
	require.GreaterOrEqual(t, after.ts, before.ts, "ts does not go back")
	require.InDelta(t, before.value+float64(after.ts-before.ts)/1e3-float64(taken), after.value, 0.01)
}

// take takes one token, which there has to be.
func (a *application) take(t *testing.T, request ratelimit.Request) {
	t.Helper()
	d, err := a.limiter.Take(t.Context(), request)
	require.NoError(t, err)
	require.True(t, d.Allowed)
}

// While the clock goes back and forth under a load, no instant is credited twice, and no more is given than comes by the latest time
// that the clock has shown.
func TestAServersClockJitters(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "servers of its own")
	_, a, clock := startClocked(t)
	tight := ratelimit.Define("tight", ratelimit.TokenBucket{Rate: 20, Period: time.Second})
	a.take(t, steady.For("key").Cost(5e8))
	before := a.bucket(t, steady)
	made, err := a.limiter.Take(t.Context(), tight.For("key")) // before the clock goes back
	require.NoError(t, err)
	first := made.At

	ctx, stop := context.WithCancel(t.Context())
	var callers sync.WaitGroup
	var mu sync.Mutex
	taken, given, refused, latest, failed := 0, 1, 0, first, error(nil)
	for range workers {
		callers.Go(func() {
			for ctx.Err() == nil {
				d, err := a.limiter.Take(t.Context(), steady.For("key"))
				tightly, errTight := a.limiter.Take(t.Context(), tight.For("key"))
				mu.Lock()
				switch {
				case err != nil || errTight != nil || !d.Allowed:
					failed = fmt.Errorf("%+v: %w, %w", d, err, errTight)
				default:
					taken++
				}
				if tightly.Allowed {
					given++
				} else {
					refused++
				}
				if tightly.At.After(latest) {
					latest = tightly.At
				}
				mu.Unlock()
			}
		})
	}
	back, last := 0, first
	ahead := 200 * time.Millisecond
	eventually(t, "the clock has stepped back often, and callers were refused", func() bool {
		clock.Set(t, ahead)
		ahead = -ahead
		now := one[time.Time](t, a.pool, `SELECT clock_timestamp()`)
		if now.Before(last) {
			back++
		}
		last = now
		mu.Lock()
		defer mu.Unlock()
		return back >= 20 && refused >= 100 && given > 40
	})
	stop()
	callers.Wait()
	require.NoError(t, failed)
	requireExactRefill(t, before, a.bucket(t, steady), taken)
	require.LessOrEqual(t, float64(given), 20+20*latest.Sub(first).Seconds())
	t.Logf("%d steps back under %d calls; %d of %d were given", back, taken+given+refused, given, given+refused)
}

// A standby whose clock is behind takes over. It credits nothing twice; a bucket gains nothing until the clock reaches the old
// primary's, for at most a minute.
func TestAPromotedServersClockIsBehind(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "servers of its own")
	server, primary, _ := startClocked(t)
	behind := postgrestest.NewClock(t)
	behind.Set(t, -50*time.Second)
	standby := connect(t, server.StartStandby(t, postgrestest.Options{Env: behind.Env()}).URL())
	primary.take(t, steady.For("key").Cost(5e8))
	before := primary.bucket(t, steady)
	awaitReplay(t, primary, standby)
	require.NoError(t, server.Stop(t.Context(), postgrestest.Fast))
	standby.promote(t)
	standby.awaitServer(t)

	for range 3 {
		standby.take(t, steady.For("key"))
	}
	after := standby.bucket(t, steady)
	requireExactRefill(t, before, after, 3)

	behind.Set(t, time.Minute)
	standby.take(t, steady.For("key"))
	caughtUp := standby.bucket(t, steady)
	requireExactRefill(t, after, caughtUp, 1)
	require.GreaterOrEqual(t, caughtUp.ts-before.ts, (50 * time.Second).Microseconds())

	behind.Set(t, -time.Hour) // further than clocks of two servers differ
	standby.take(t, steady.For("key"))
	mended := standby.bucket(t, steady)
	require.InDelta(t, caughtUp.value-1, mended.value, 0.01, "the way back brings nothing")
	require.Less(t, mended.ts, caughtUp.ts-(50*time.Minute).Microseconds(), "and it does not wait for the hour")
	behind.Set(t, -time.Hour+time.Minute)
	standby.take(t, steady.For("key"))
	requireExactRefill(t, mended, standby.bucket(t, steady), 1)
}
