//go:build unix

package server_test

import (
	"context"
	"fmt"
	"math"
	"sync"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// unwritten are the settings of a server on which only commits and the writer of the log write the log.
var unwritten = map[string]string{
	"synchronous_commit": "on", "wal_writer_delay": "10s", "wal_level": "minimal", "max_wal_senders": "0",
	"autovacuum": "off", "bgwriter_lru_maxpages": "0", "checkpoint_timeout": "1h",
}

// stopWriter stops the writer of the log, so that only commits write it. It returns what ends the writer.
func (a *application) stopWriter(t *testing.T) (kill func()) {
	t.Helper()
	writer := one[int](t, a.pool, `SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'`)
	require.NoError(t, syscall.Kill(writer, syscall.SIGSTOP))
	t.Cleanup(func() { _ = syscall.Kill(writer, syscall.SIGCONT) })
	return func() { require.NoError(t, syscall.Kill(writer, syscall.SIGKILL)) }
}

// relaxed returns a limiter on the application's pool whose commits are relaxed.
func (a *application) relaxed(t *testing.T) *ratelimit.Limiter {
	t.Helper()
	limiter, err := ratelimit.New(a.pool, ratelimit.Config{Timeout: patient, RelaxedCommit: true})
	require.NoError(t, err)
	return limiter
}

// The calls that keep nothing but tokens return before their commits are on disk. All others return after that.
func TestRelaxedCommitsAreThoseOfTokensOnly(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "a server of its own")
	_, a := startServer(t, postgrestest.Options{Settings: unwritten})
	l := a.relaxed(t)
	slides := ratelimit.Define("slides", ratelimit.SlidingWindow{Rate: capacity, Period: ratelimit.Day})
	slots := ratelimit.Define("slots", ratelimit.Concurrency{Most: 10})
	do := func(call func(ctx context.Context) error) {
		require.NoError(t, call(t.Context()))
	}
	take := func(requests ...ratelimit.Request) func(context.Context) error {
		return func(ctx context.Context) error { return l.Require(ctx, requests...) }
	}
	reserve := func(ctx context.Context) (ratelimit.Reservation, error) { return l.Reserve(ctx, reserved.For("ada")) }
	acquire := func(ctx context.Context) (ratelimit.Lease, error) { return l.Acquire(ctx, slots.For("ada")) }
	for _, request := range []ratelimit.Request{sent.For("ada"), sent.For("bob"), slides.For("ada")} { // each row is there
		do(take(request))
	}
	first, err := reserve(t.Context())
	require.NoError(t, err)
	second, err := reserve(t.Context())
	require.NoError(t, err)
	lease, err := acquire(t.Context())
	require.NoError(t, err)
	a.stopWriter(t)

	for name, test := range map[string]struct {
		relaxed bool
		call    func(ctx context.Context) error
	}{
		"Take":        {true, take(sent.For("ada"))},
		"TakeNew":     {true, take(sent.For("a new key"))},
		"TakeSlides":  {true, take(slides.For("ada"))},
		"TakeSeveral": {true, take(sent.For("ada"), sent.For("bob"))},
		"TakeUnlike":  {true, take(sent.For("ada"), slides.For("ada"))},
		"TakeTogether": {true, func(ctx context.Context) error {
			return together(8, func(int) error { return take(sent.For("ada"))(ctx) })
		}},
		"TakeMany": {true, func(ctx context.Context) error {
			return together(8, func(i int) error { return take(sent.For(fmt.Sprint(i)))(ctx) })
		}},
		"TakeUpTo": {true, func(ctx context.Context) error {
			_, _, err := l.TakeUpTo(ctx, 3, sent.For("ada"))
			return err
		}},
		"Credit": {true, func(ctx context.Context) error { return l.Credit(ctx, sent.For("ada")) }},
		"InTx": {false, func(ctx context.Context) error {
			return l.InTx(ctx, func(tx pgx.Tx) error { return l.WithTx(tx).Require(ctx, sent.For("ada")) })
		}},
		"WithTx": {false, func(ctx context.Context) error {
			return pgx.BeginFunc(ctx, a.pool, func(tx pgx.Tx) error { return l.WithTx(tx).Require(ctx, sent.For("ada"), slides.For("ada")) })
		}},
		"Reserve": {false, func(ctx context.Context) error { _, err := reserve(ctx); return err }},
		"ReserveSeveral": {false, func(ctx context.Context) error {
			_, err := l.Reserve(ctx, reserved.For("ada"), sent.For("bob"))
			return err
		}},
		"Settle":     {false, func(ctx context.Context) error { return l.Settle(ctx, first.ID, reserved.For("ada").Cost(2)) }},
		"Cancel":     {false, func(ctx context.Context) error { return l.Cancel(ctx, second.ID) }},
		"Acquire":    {false, func(ctx context.Context) error { _, err := acquire(ctx); return err }},
		"RenewLease": {false, func(ctx context.Context) error { _, err := l.RenewLease(ctx, lease.ID); return err }},
		"Other":      {false, func(ctx context.Context) error { return a.limiter.Require(ctx, sent.For("ada")) }},
	} {
		// A commit that is flushed has the whole log flushed.
		do(func(ctx context.Context) error { return a.limiter.Require(ctx, sent.For("the log is on disk")) })
		before := one[string](t, a.pool, `SELECT pg_current_wal_insert_lsn()::text`)
		do(test.call)
		require.True(t, one[bool](t, a.pool, `SELECT pg_current_wal_insert_lsn() > $1::text::pg_lsn`, before), "%s writes", name)
		onDisk := one[bool](t, a.pool, `SELECT pg_current_wal_flush_lsn() >= pg_current_wal_insert_lsn()`)
		require.Equal(t, test.relaxed, !onDisk, name)
		require.Equal(t, "on", one[string](t, a.pool, `SHOW synchronous_commit`), "%s leaves the session as it was", name)
	}
}

// together runs calls at once, and returns the first error.
func together(n int, call func(i int) error) (err error) {
	var done sync.WaitGroup
	failed := make(chan error, n)
	for i := range n {
		done.Go(func() { failed <- call(i) })
	}
	done.Wait()
	close(failed)
	for e := range failed {
		if err == nil {
			err = e
		}
	}
	return err
}

// A crash forgets relaxed takes that were not on disk yet, whole ones, and never more than were taken. It forgets nothing else.
func TestACrashForgetsOnlyRelaxedTakes(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "a server of its own")
	const kept, forgotten = 20, 30
	server, a := startServer(t, postgrestest.Options{Settings: unwritten})
	l := a.relaxed(t)
	kill := a.stopWriter(t)
	take := func(times int) {
		for range times {
			require.NoError(t, l.Require(t.Context(), sent.For("ada").Cost(2)))
		}
	}
	take(kept)
	a.limiter = l
	require.NoError(t, a.do(t.Context(), 0, 0)) // in a transaction of InTx on the same pool
	take(forgotten)

	require.NoError(t, server.Stop(t.Context(), postgrestest.Kill))
	kill()
	require.NoError(t, server.Restart(t.Context()))
	a.awaitServer(t)
	require.Equal(t, 1, one[int](t, a.pool, `SELECT count(*) FROM public.work`))
	require.Equal(t, 1, one[int](t, a.pool, `SELECT count(*) FROM ratelimit.reservations`))
	left := one[float64](t, a.pool, `SELECT value FROM ratelimit.buckets WHERE name = 'sent' AND key = 'ada'`)
	taken := int(math.Round((capacity - left) / 2))
	t.Logf("%d of %d takes are left", taken, kept+forgotten)
	require.InDelta(t, left, float64(capacity-2*taken), 0.01, "whole takes")
	require.Equal(t, kept, taken, "those before the transaction of InTx are on disk, and nothing has written the others")
}
