//go:build unix

package server_test

import (
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// With synchronous_commit off a crash loses the last commits, each with its tokens, its reservation and its work. Commits on disk
// are not lost; Postgres promises that writing takes no longer than three times wal_writer_delay.
func TestACrashWithoutSynchronousCommitLosesTheLastCommitsWhole(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "servers of its own")
	server, a := startServer(t, postgrestest.Options{Settings: map[string]string{
		"synchronous_commit": "off", "wal_writer_delay": "200ms",
		// Nothing but the writer of the log, which the test stops, writes it out.
		"autovacuum": "off", "bgwriter_lru_maxpages": "0", "checkpoint_timeout": "1h",
	}})
	for _, mode := range []postgrestest.StopMode{postgrestest.Immediate, postgrestest.Kill} {
		a.exec(t, `TRUNCATE public.work, ratelimit.buckets, ratelimit.reservations`)
		l := a.startLoad(t)
		l.awaitAcks(t, 20)
		certain, position := l.acks(), one[string](t, a.pool, `SELECT pg_current_wal_insert_lsn()::text`)
		began := time.Now()
		eventually(t, "the log is on disk up to there", func() bool {
			return one[bool](t, a.pool, `SELECT pg_current_wal_flush_lsn() >= $1::text::pg_lsn`, position)
		})
		written := time.Since(began)

		writer := one[int](t, a.pool, `SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'`)
		require.NoError(t, syscall.Kill(writer, syscall.SIGSTOP))
		t.Cleanup(func() { _ = syscall.Kill(writer, syscall.SIGCONT) })
		l.awaitAcks(t, 20)
		if mode == postgrestest.Kill { // without the main process nothing restarts the sessions that the writer's death ends
			require.NoError(t, server.Stop(t.Context(), mode))
			require.NoError(t, syscall.Kill(writer, syscall.SIGKILL))
		} else {
			stopped := make(chan error, 1)
			go func() { stopped <- server.Stop(t.Context(), mode) }()
			eventually(t, "the server ends its processes", func() bool { return a.pool.Ping(t.Context()) != nil })
			_ = syscall.Kill(writer, syscall.SIGKILL)
			require.NoError(t, <-stopped)
		}
		l.finish()
		require.NoError(t, server.Restart(t.Context()))
		a.awaitServer(t)

		left := a.requireWhole(t)
		lost := l.requireSuffixLost(t, a, certain)
		t.Logf("%s: %d pieces of work are left, %d that were acknowledged are lost, %d unknown; the log was written out within %v",
			mode, left, lost, l.unknown.Load(), written)
		require.Positive(t, lost, "nothing wrote the log out")
	}
}
