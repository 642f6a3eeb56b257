//go:build unix

package server_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// mountDisk returns the directory of a small file system in memory, which needs root on Linux.
func mountDisk(t *testing.T) string {
	t.Helper()
	directory := t.TempDir()
	require.NoError(t, os.Chmod(filepath.Dir(directory), 0o755)) // the server's user passes through
	mount := exec.CommandContext(t.Context(), "mount", "-t", "tmpfs", "-o", "size=192m,mode=1777", "tmpfs", directory)
	if out, err := mount.CombinedOutput(); err != nil {
		postgrestest.GiveUp(t, fmt.Errorf("%w: its disk cannot be mounted: %w: %s", postgrestest.ErrNoServer, err, out))
	}
	t.Cleanup(func() {
		unmount := exec.CommandContext(context.WithoutCancel(t.Context()), "umount", "--lazy", directory)
		require.NoError(t, unmount.Run())
	})
	return directory
}

// fill writes a file that leaves no room on the disk, until free is called.
func fill(t *testing.T, disk string) (free func()) {
	t.Helper()
	path := filepath.Join(disk, "filler")
	file, err := os.Create(path)
	require.NoError(t, err)
	defer func() { require.NoError(t, file.Close()) }()
	page := make([]byte, 4096) // a file system in memory gives whole pages
	for {
		if _, err = file.Write(page); err != nil {
			break
		}
	}
	require.ErrorIs(t, err, syscall.ENOSPC)
	return func() { require.NoError(t, os.Remove(path)) }
}

// longKey returns one of many keys, whose rows need new pages.
func longKey(n int) string { return fmt.Sprintf("long %d %s", n, strings.Repeat("k", 200)) }

// While there is no room for data a call for a new key fails, and one for a row that is there goes on. When there is
// none for the log either, the server stops itself. Nothing is half done, and everything works when there is room
// again.
func TestAFullDisk(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "servers of its own")
	disk := mountDisk(t)
	server, a := startServer(t, postgrestest.Options{Parent: disk, Settings: map[string]string{
		"min_wal_size": "32MB", "max_wal_size": "64MB", "autovacuum": "off", "checkpoint_timeout": "1h", "restart_after_crash": "off",
	}})
	require.NoError(t, a.do(t.Context(), workers, 0))
	free := fill(t, disk)
	a.requireNoRoomForData(t)
	free()
	a.Exec(t, `DELETE FROM ratelimit.buckets WHERE starts_with(key, 'long')`)
	require.NoError(t, a.do(t.Context(), workers, 1))
	a.requireWhole(t)

	l := a.startLoad(t)
	l.awaitAcks(t, 5)
	free = fill(t, disk)
	world.Eventually(t, "the log finds no room, and the server stops", func() bool {
		_, err := a.Pool.Exec(t.Context(), `SELECT pg_switch_wal()`)
		return err != nil && a.Pool.Ping(t.Context()) != nil
	})
	_, err := a.Limiter.Take(t.Context(), sent.For("ada"))
	require.Error(t, err)
	require.NotErrorIs(t, err, ratelimit.ErrLimited)
	l.finish()
	free()
	world.Eventually(t, "the server has stopped, and starts again", func() bool { return server.Restart(t.Context()) == nil })
	a.awaitServer(t)
	a.requireWhole(t)
	require.Zero(t, l.requireSuffixLost(t, a, l.acks()))
	require.NoError(t, a.do(t.Context(), workers, 2))
}

// requireNoRoomForData takes for new keys until their table finds no room, and checks that what failed has left
// nothing.
func (a *application) requireNoRoomForData(t *testing.T) {
	t.Helper()
	const most = 100_000
	admitted := 0
	var err error
	for ; admitted < most && err == nil; admitted++ {
		_, err = a.Limiter.Take(t.Context(), sent.For(longKey(admitted)))
	}
	require.Equal(t, "53100", sqlstate(err), "%v", err)
	require.True(t, ratelimit.IsUndecided(err))
	admitted-- // the failed call
	for name, call := range map[string]func(context.Context) error{
		"Take": func(ctx context.Context) error { _, err := a.Limiter.Take(ctx, sent.For(longKey(most))); return err },
		"TakeSeveral": func(ctx context.Context) error {
			_, err := a.Limiter.Take(ctx, sent.For("0"), sent.For(longKey(most)))
			return err
		},
		"Reserve": func(ctx context.Context) error { _, err := a.Limiter.Reserve(ctx, sent.For(longKey(most))); return err },
		"Acquire": func(ctx context.Context) error {
			_, err := a.Limiter.Acquire(ctx, slots.For(longKey(most)))
			return err
		},
	} {
		err := call(t.Context())
		require.Equal(t, "53100", sqlstate(err), "%s: %v", name, err)
		require.NotErrorIs(t, err, ratelimit.ErrLimited, name)
	}
	require.Equal(t, admitted, one[int](t, a.Pool, `SELECT count(*) FROM ratelimit.buckets WHERE starts_with(key, 'long')`))
	require.Equal(t, 1, one[int](t, a.Pool, `SELECT count(*) FROM ratelimit.reservations`))
	d, err := a.Limiter.Take(t.Context(), sent.For("the first call"))
	require.NoError(t, err, "its row is there")
	require.True(t, d.Allowed)
}
