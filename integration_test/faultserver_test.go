package integration_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// serverStand is a stand on a server of the test's own, to stop and to kill.
type serverStand struct {
	*stand
	server *postgrestest.Server
}

func newServerStand(t *testing.T) *serverStand {
	t.Helper()
	inside, server := setupOwn(t, map[string]string{"synchronous_commit": "on"})
	s := &stand{bundle: inside, outside: openOutside(t, server.URL())}
	s.makeMessages(t)
	return &serverStand{stand: s, server: server}
}

func (s *serverStand) stop(t *testing.T, mode postgrestest.StopMode) {
	t.Helper()
	require.NoError(t, s.server.Stop(t.Context(), mode))
}

func (s *serverStand) restart(t *testing.T) {
	t.Helper()
	require.NoError(t, s.server.Restart(t.Context()))
}

// awaitRecovery returns when the limiter is through to the server again: each of the pool's connections
// is found dead by the call that gets it, which fails closed.
func (s *serverStand) awaitRecovery(t *testing.T) {
	t.Helper()
	s.reconnect(t)
	eventually(t, "the limiter works again", func() bool {
		d, err := s.limiter.Take(t.Context(), calls.For("the first caller"))
		return err == nil && d.Allowed
	})
}

// reconnect gives outside new connections.
func (s *serverStand) reconnect(t *testing.T) {
	t.Helper()
	s.outside.pool.Reset()
	eventually(t, "the server takes connections", func() bool { return s.outside.pool.Ping(t.Context()) == nil })
}

func TestEveryCallFailsClosedWhenTheServerIsDown(t *testing.T) {
	t.Parallel()
	s := newServerStand(t)
	require.NoError(t, s.takeOutside(t.Context(), "ada"))
	before := s.outside.rows(t, "ada")
	s.stop(t, postgrestest.Fast)
	for _, verbs := range []map[string]verb{writes, reads} {
		for name, call := range verbs {
			ctx, cancel := context.WithTimeout(t.Context(), patient)
			allowed, err := call(ctx, s.limiter)
			cancel()
			require.Error(t, err, name)
			require.False(t, allowed && name != "Reset", name)
			require.NotErrorIs(t, err, ratelimit.ErrLimited, name)
			require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown, name)
			require.NotErrorIs(t, err, context.DeadlineExceeded, "%s reports it by itself", name)
		}
	}
	err := s.limiter.InTx(t.Context(), func(pgx.Tx) error {
		t.Error("the function was run without a transaction")
		return nil
	})
	require.Error(t, err)
	s.restart(t)
	s.awaitRecovery(t)
	require.Equal(t, before, s.outside.rows(t, "ada"))
	s.requireHealthy(t)
}

func TestWritesFailClosedOnAHotStandby(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "it restarts a server of its own as a standby")
	s := newServerStand(t)
	require.NoError(t, s.takeOutside(t.Context(), "ada"))

	// With this file a server recovers for ever, and can be read meanwhile, as the standby of a primary.
	signal := filepath.Join(s.dataDirectory(t), "standby.signal")
	s.stop(t, postgrestest.Fast)
	require.NoError(t, os.WriteFile(signal, nil, 0o600))
	s.restart(t)
	s.pool.Reset()
	s.reconnect(t)
	s.requireClosed(t, writes, patient, func(err error) bool {
		return sqlstate(err) == "25006" || sqlstate(err) == "0A000" // 0A000 at SERIALIZABLE
	})
	for name, read := range reads {
		_, err := read(t.Context(), s.limiter)
		require.NoError(t, err, name)
	}

	s.stop(t, postgrestest.Fast)
	require.NoError(t, os.Remove(signal))
	s.restart(t)
	s.awaitRecovery(t)
	s.requireHealthy(t)
}

// dataDirectory returns where the server's files are, and skips the test when that is not on this machine.
func (s *serverStand) dataDirectory(t *testing.T) (path string) {
	t.Helper()
	require.NoError(t, s.outside.pool.QueryRow(t.Context(), `SHOW data_directory`).Scan(&path))
	if _, err := os.Stat(path); err != nil {
		t.Skipf("the server is not on this machine: %v", err)
	}
	return path
}

// load is a group of workers that send until they are stopped, also while the server fails. It counts their answers.
type load struct {
	acked, unknown, failed, refused atomic.Int64

	stop context.CancelFunc
	done sync.WaitGroup
}

const loadWorkers = 4

// startLoad has each worker send under all of the keys in turn, so that they also conflict.
func (s *stand) startLoad(t *testing.T) *load {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	l := &load{stop: cancel}
	t.Cleanup(l.finish)
	for worker := range loadWorkers {
		l.done.Go(func() {
			for n := worker; ctx.Err() == nil; n++ {
				key := fmt.Sprintf("key %d", n%(2*loadWorkers))
				// Not on the load's context: every answer counts, also the last.
				l.count(s.limiter.InTx(context.WithoutCancel(ctx), func(tx pgx.Tx) error {
					if n%4 < 2 {
						return s.sendSharded(context.WithoutCancel(ctx), tx, key)
					}
					return s.send(context.WithoutCancel(ctx), tx, key)
				}))
			}
		})
	}
	return l
}

func (l *load) count(err error) {
	switch {
	case err == nil:
		l.acked.Add(1)
	case errors.Is(err, ratelimit.ErrCommitUnknown):
		l.unknown.Add(1)
	case errors.Is(err, ratelimit.ErrLimited):
		l.refused.Add(1)
	default:
		l.failed.Add(1)
	}
}

func (l *load) finish() {
	l.stop()
	l.done.Wait()
}

// awaitAcks waits until that many more calls were allowed.
func (l *load) awaitAcks(t *testing.T, more int64) {
	t.Helper()
	want := l.acked.Load() + more
	eventually(t, "calls are let through", func() bool { return l.acked.Load() >= want })
}

func TestACrashOfTheServerLosesNothingThatWasAcknowledged(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "it stops a server of its own four times")
	s := newServerStand(t)
	s.dataDirectory(t)
	stop := func(mode postgrestest.StopMode) func(*testing.T) {
		return func(t *testing.T) {
			t.Helper()
			s.stop(t, mode)
			s.restart(t)
		}
	}
	for _, fault := range []struct {
		name  string
		cause func(t *testing.T)
	}{
		{name: "a backend is killed", cause: s.killBackend},
		{name: "the server is stopped", cause: stop(postgrestest.Fast)},
		{name: "the server crashes", cause: stop(postgrestest.Immediate)},
		{name: "the server's main process is killed", cause: stop(postgrestest.Kill)},
	} {
		s.empty(t)
		l := s.startLoad(t)
		const acks = 100
		l.awaitAcks(t, acks)
		fault.cause(t)
		l.awaitAcks(t, acks)
		l.finish()
		s.reconnect(t)

		acked, unknown, taken := int(l.acked.Load()), int(l.unknown.Load()), s.taken(t)
		t.Logf("%s: %d acknowledged, %d unknown, %d failed, %d taken", fault.name, acked, unknown, l.failed.Load(), taken)
		require.LessOrEqual(t, acked, taken, fault.name)
		require.LessOrEqual(t, taken, acked+unknown, fault.name)
		require.Equal(t, taken, s.messages(t), fault.name)
		require.Equal(t, s.takenFrom(t, shardedCalls), s.outside.count(t, `SELECT count(*) FROM public.messages WHERE starts_with(key, $1)`, shardedKey))
		require.Zero(t, l.refused.Load(), "%s: the limits were large enough", fault.name)
		s.requireIdle(t)
	}
	s.awaitRecovery(t)
	s.requireHealthy(t)
}

// empty starts the counting anew.
func (s *stand) empty(t *testing.T) {
	t.Helper()
	s.outside.exec(t, `TRUNCATE public.messages, ratelimit.buckets`)
}

// killBackend takes away the process of one of the limiter's sessions, upon which the server ends all others
// and recovers.
func (s *serverStand) killBackend(t *testing.T) {
	t.Helper()
	var pid int
	eventually(t, "a session is at work", func() bool {
		return s.outside.pool.QueryRow(t.Context(), `SELECT pid FROM pg_stat_activity WHERE datname = current_database()
			AND application_name <> 'outside' AND state <> 'idle' LIMIT 1`).Scan(&pid) == nil
	})
	witness, err := s.outside.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer witness.Release()
	process, err := os.FindProcess(pid)
	require.NoError(t, err)
	require.NoError(t, process.Kill())
	eventually(t, "the server ends the other sessions", func() bool { return witness.Ping(t.Context()) != nil })
}
