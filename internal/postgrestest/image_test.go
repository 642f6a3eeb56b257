//go:build unix

package postgrestest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/migrations"
)

// counted returns a directory of server programs whose initdb writes a line for each of its runs, and how many lines there are.
func counted(t *testing.T, env environment) (binDir string, runs func() int) {
	t.Helper()
	dirs, err := binDirs(t.Context(), env)
	require.NoError(t, err)
	binDir = t.TempDir()
	log := filepath.Join(binDir, "runs")
	require.NoError(t, os.WriteFile(log, nil, 0o600))
	require.NoError(t, os.Chmod(log, 0o666)) // the server's user writes it
	for _, program := range []string{"initdb", "pg_ctl", "postgres"} {
		script := fmt.Sprintf("#!/bin/sh\nexec %s \"$@\"\n", filepath.Join(dirs[0], program))
		if program == "initdb" {
			script = strings.Replace(script, "exec", "echo run >>"+log+"\nexec", 1)
		}
		require.NoError(t, os.WriteFile(filepath.Join(binDir, program), []byte(script), 0o700))
		require.NoError(t, os.Chmod(filepath.Join(binDir, program), 0o755))
	}
	require.NoError(t, os.Chmod(filepath.Dir(binDir), 0o755))
	return binDir, func() int {
		content, err := os.ReadFile(log)
		require.NoError(t, err)
		return strings.Count(string(content), "\n")
	}
}

// startFrom starts a server from the cache, closes it, and returns whether it began with the template.
func startFrom(t *testing.T, binDir, cache string) (hasTemplate bool, err error) {
	t.Helper()
	server, err := startLocal(t.Context(), Options{Settings: map[string]string{"max_connections": "7"}}, environment{binDir: binDir, cache: cache})
	if err != nil {
		return false, err
	}
	err = admin(t.Context(), server, func(conn *pgx.Conn) error {
		const query = `SELECT count(*) = 1 FROM pg_database WHERE datname LIKE 'ratelimit\_template%' AND current_setting('max_connections') = '7'`
		return conn.QueryRow(t.Context(), query).Scan(&hasTemplate)
	})
	require.NoError(t, server.Close())
	return hasTemplate, err
}

func TestServersBeginFromAnImage(t *testing.T) {
	t.Parallel()
	env := needsLocal(t)

	t.Run("ThatIsMadeOnceForAllThatStartAtOnce", func(t *testing.T) {
		t.Parallel()
		testsize.Long(t, "initdb takes a second, and it starts four servers")
		binDir, runs := counted(t, env)
		cache := filepath.Join(t.TempDir(), "new")
		var group errgroup.Group
		for range 4 {
			group.Go(func() error {
				hasTemplate, err := startFrom(t, binDir, cache)
				if err == nil && !hasTemplate {
					err = fmt.Errorf("there is no template")
				}
				return err
			})
		}
		require.NoError(t, group.Wait())
		require.Equal(t, 1, runs())
	})

	t.Run("ThatIsMadeAnewWhenItIsGone", func(t *testing.T) {
		t.Parallel()
		testsize.Long(t, "it makes an image twice, and starts four servers for it")
		binDir, runs := counted(t, env)
		cache := t.TempDir()
		for wanted := 1; wanted <= 2; wanted++ {
			for range 2 {
				hasTemplate, err := startFrom(t, binDir, cache)
				require.NoError(t, err)
				require.True(t, hasTemplate)
				require.Equal(t, wanted, runs())
			}
			images, err := filepath.Glob(filepath.Join(cache, imagePrefix+"*"))
			require.NoError(t, err)
			require.Len(t, images, 1)
			require.NoError(t, os.RemoveAll(images[0]))
		}
	})

	t.Run("AndWithoutACacheDirectoryFromInitdb", func(t *testing.T) {
		t.Parallel()
		testsize.Long(t, "initdb takes a second")
		binDir, runs := counted(t, env)
		file := filepath.Join(t.TempDir(), "file")
		require.NoError(t, os.WriteFile(file, nil, 0o600))
		for i, cache := range []string{"", file, filepath.Join(file, "below")} {
			hasTemplate, err := startFrom(t, binDir, cache)
			require.NoError(t, err)
			require.False(t, hasTemplate)
			require.Equal(t, i+1, runs())
		}
	})
}

func TestImageKey(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, program := range []string{"initdb", "postgres"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, program), nil, 0o700))
	}
	key := func(cfg migrations.Config) string {
		key, err := imageKey(dir, cfg)
		require.NoError(t, err)
		return key
	}
	plain := key(migrations.Config{})
	require.Equal(t, plain, key(migrations.Config{}))
	require.NotEqual(t, plain, key(migrations.Config{Partitions: 2}))
	require.NoError(t, os.Chtimes(filepath.Join(dir, "postgres"), time.Now(), time.Now().Add(-time.Hour)))
	older := key(migrations.Config{})
	require.NotEqual(t, plain, older, "another version was installed")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "initdb"), []byte("#"), 0o700))
	require.NotEqual(t, older, key(migrations.Config{}))
	_, err := imageKey(t.TempDir(), migrations.Config{})
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestCacheKeepsTheImagesThatWereUsedLast(t *testing.T) {
	t.Parallel()
	cache, now := t.TempDir(), time.Now()
	write := func(name string, age time.Duration) {
		path := filepath.Join(cache, name)
		require.NoError(t, os.Mkdir(path, 0o700))
		require.NoError(t, os.Chtimes(path, now.Add(-age), now.Add(-age)))
	}
	for i := range keptImages + 3 {
		write(fmt.Sprint(imagePrefix, i), time.Duration(i)*time.Minute)
	}
	write(imageLock, 2*leftoverAge)
	write("unfinished-1", 2*leftoverAge)
	write("unfinished-2", time.Minute)
	cleanCache(cache)
	for i := range keptImages + 3 {
		_, err := os.Stat(filepath.Join(cache, fmt.Sprint(imagePrefix, i)))
		require.Equal(t, i < keptImages, err == nil, i)
	}
	require.DirExists(t, filepath.Join(cache, imageLock))
	require.DirExists(t, filepath.Join(cache, "unfinished-2"))
	require.NoDirExists(t, filepath.Join(cache, "unfinished-1"))
}
