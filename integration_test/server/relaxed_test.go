//go:build unix

package server_test

import (
	"fmt"
	"maps"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// startUnwritten starts a server on which only the writer of the log, and commits that wait for the disk, write the
// log.
func startUnwritten(t *testing.T, settings map[string]string) (*postgrestest.Server, *application) {
	t.Helper()
	all := map[string]string{"autovacuum": "off", "bgwriter_lru_maxpages": "0", "checkpoint_timeout": "1h"}
	maps.Copy(all, settings)
	return startServer(t, postgrestest.Options{Settings: all})
}

// relaxed are the settings of a server for Config.RelaxedCommit.
var relaxed = map[string]string{"synchronous_commit": "on", "wal_writer_delay": "10s", "wal_level": "minimal", "max_wal_senders": "0"}

// stopWriter stops the writer of the log. It returns what ends the writer.
func (a *application) stopWriter(t *testing.T) (kill func()) {
	t.Helper()
	writer := one[int](t, a.Pool, `SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'`)
	require.NoError(t, syscall.Kill(writer, syscall.SIGSTOP))
	t.Cleanup(func() { _ = syscall.Kill(writer, syscall.SIGCONT) })
	return func() { _ = syscall.Kill(writer, syscall.SIGKILL) }
}

// With synchronous_commit off a crash loses the last commits, each with its tokens, its reservation and its work.
// Commits on disk are not lost; Postgres promises that writing takes no longer than three times wal_writer_delay.
func TestACrashWithoutSynchronousCommitLosesWholeCommits(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "servers of its own")
	server, a := startUnwritten(t, map[string]string{"synchronous_commit": "off", "wal_writer_delay": "200ms"})
	for _, mode := range []postgrestest.StopMode{postgrestest.Immediate, postgrestest.Kill} {
		a.Exec(t, `TRUNCATE public.work, ratelimit.buckets, ratelimit.leases, ratelimit.reservations`)
		l := a.startLoad(t)
		l.awaitAcks(t, 20)
		certain, position := l.acks(), one[string](t, a.Pool, `SELECT pg_current_wal_insert_lsn()::text`)
		world.Eventually(t, "the log is on disk up to there", func() bool {
			return one[bool](t, a.Pool, `SELECT pg_current_wal_flush_lsn() >= $1::text::pg_lsn`, position)
		})
		kill := a.stopWriter(t)
		l.awaitAcks(t, 20)
		if mode == postgrestest.Kill { // without the main process nothing restarts the sessions that the writer's death ends
			require.NoError(t, server.Stop(t.Context(), mode))
			kill()
		} else {
			stopped := make(chan error, 1)
			go func() { stopped <- server.Stop(t.Context(), mode) }()
			world.Eventually(t, "the server ends its processes", func() bool { return a.Pool.Ping(t.Context()) != nil })
			kill()
			require.NoError(t, <-stopped)
		}
		l.finish()
		require.NoError(t, server.Restart(t.Context()))
		a.awaitServer(t)
		a.requireWhole(t)
		require.Positive(t, l.requireSuffixLost(t, a, certain), "nothing wrote the log out")
	}
}

// The calls that keep nothing but tokens return before their commits are on disk. All others return after that.
func TestOnlyCommitsOfTokensAreRelaxed(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "a server of its own")
	_, a := startUnwritten(t, relaxed)
	l, ctx := a.With(t, ratelimit.Config{RelaxedCommit: true}), t.Context()
	slides := ratelimit.Define("slides", ratelimit.SlidingWindow{Rate: capacity, Period: ratelimit.Day})
	slots := ratelimit.Define("slots", ratelimit.Concurrency{Slots: 10})
	take := func(requests ...ratelimit.Request) func() error {
		return func() error { return l.Require(ctx, requests...) }
	}
	for _, request := range []ratelimit.Request{sent.For("ada"), sent.For("bob"), slides.For("ada")} { // each row is there
		require.NoError(t, take(request)())
	}
	var open [2]ratelimit.Reservation
	for i := range open {
		var err error
		open[i], err = l.Reserve(ctx, reserved.For("ada"))
		require.NoError(t, err)
	}
	lease, err := l.Acquire(ctx, slots.For("ada"))
	require.NoError(t, err)
	a.stopWriter(t)

	for name, test := range map[string]struct {
		relaxed bool
		call    func() error
	}{
		"Take":         {true, take(sent.For("ada"))},
		"TakeNew":      {true, take(sent.For("a new key"))},
		"TakeSlides":   {true, take(slides.For("ada"))},
		"TakeSeveral":  {true, take(sent.For("ada"), sent.For("bob"))},
		"TakeUnlike":   {true, take(sent.For("ada"), slides.For("ada"))},
		"TakeTogether": {true, func() error { return atonce.Do(8, func(int) error { return take(sent.For("ada"))() }) }},
		"TakeMany":     {true, func() error { return atonce.Do(8, func(i int) error { return take(sent.For(fmt.Sprint(i)))() }) }},
		"Credit":       {true, func() error { return l.Credit(ctx, sent.For("ada")) }},
		"InTx": {false, func() error {
			return l.InTx(ctx, func(tx pgx.Tx) error { return l.WithTx(tx).Require(ctx, sent.For("ada")) })
		}},
		"WithTx": {false, func() error {
			return pgx.BeginFunc(ctx, a.Pool, func(tx pgx.Tx) error { return l.WithTx(tx).Require(ctx, sent.For("ada"), slides.For("ada")) })
		}},
		"Reserve":        {false, func() error { _, err := l.Reserve(ctx, reserved.For("ada")); return err }},
		"ReserveSeveral": {false, func() error { _, err := l.Reserve(ctx, reserved.For("ada"), sent.For("bob")); return err }},
		"Settle":         {false, func() error { return l.Settle(ctx, open[0].ID, reserved.For("ada").Cost(2)) }},
		"Cancel":         {false, func() error { return l.Cancel(ctx, open[1].ID) }},
		"Acquire":        {false, func() error { _, err := l.Acquire(ctx, slots.For("ada")); return err }},
		"RenewLease":     {false, func() error { _, err := l.RenewLease(ctx, lease.ID); return err }},
		"Other":          {false, func() error { return a.Limiter.Require(ctx, sent.For("ada")) }},
	} {
		// A commit that is flushed has the whole log flushed.
		require.NoError(t, a.Limiter.Require(ctx, sent.For("the log is on disk")))
		before := one[string](t, a.Pool, `SELECT pg_current_wal_insert_lsn()::text`)
		require.NoError(t, test.call(), name)
		require.True(t, one[bool](t, a.Pool, `SELECT pg_current_wal_insert_lsn() > $1::text::pg_lsn`, before), "%s writes", name)
		onDisk := one[bool](t, a.Pool, `SELECT pg_current_wal_flush_lsn() >= pg_current_wal_insert_lsn()`)
		require.Equal(t, test.relaxed, !onDisk, name)
		require.Equal(t, "on", one[string](t, a.Pool, `SHOW synchronous_commit`), "%s leaves the session as it was", name)
	}
}
