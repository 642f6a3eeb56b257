package integration_test

import (
	"context"
	"os"
	"path/filepath"
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
