//go:build unix

package postgrestest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	embeddedpostgres "github.com/fergusstrange/embedded-postgres"
)

const embeddedVersion = embeddedpostgres.V17

// startEmbedded downloads a server's programs once, into the user's cache directory, and then starts
// them like any other server of this machine.
func startEmbedded(ctx context.Context, opts Options, _ environment) (*Server, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, fmt.Errorf("find the cache directory: %w", err)
	}
	if os.Geteuid() == 0 {
		cache = "/var/cache" // root's own is closed to the user that the server runs as
	}
	return startDownloaded(ctx, opts, filepath.Join(cache, "pgratelimit"), embeddedpostgres.DefaultConfig())
}

func startDownloaded(ctx context.Context, opts Options, cache string, config embeddedpostgres.Config) (*Server, error) {
	programs := filepath.Join(cache, "postgres-"+string(embeddedVersion))
	binDir := filepath.Join(programs, "bin")
	if checkBinDir(binDir) != nil {
		if err := download(ctx, config, cache, programs); err != nil {
			return nil, fmt.Errorf("download PostgreSQL %s: %w", embeddedVersion, err)
		}
	}
	server, err := startCluster(ctx, binDir, opts)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", binDir, err)
	}
	return server, nil
}

// download puts the programs into a directory of its own and moves it to programs when all are
// there, so that several processes can do it at once.
func download(ctx context.Context, config embeddedpostgres.Config, cache, programs string) error {
	// The server's user has to be able to enter the directories, when that is another user.
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return err
	}
	work, err := os.MkdirTemp(cache, "download-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(work) }()
	if err := fetch(ctx, config, work); err != nil {
		return err
	}
	err = os.Rename(filepath.Join(work, "programs"), programs)
	if err != nil && checkBinDir(filepath.Join(programs, "bin")) == nil {
		return nil // another process was first
	}
	return err
}

// fetch has embedded-postgres put the programs into work/programs. The library downloads as a part of
// starting a server, which it cannot do as root and which is startCluster's task anyway; so what
// counts is whether the programs are there.
func fetch(ctx context.Context, config embeddedpostgres.Config, work string) error {
	ctx, cancel := context.WithTimeout(ctx, downloadTimeout)
	defer cancel()
	port, err := freePort(ctx)
	if err != nil {
		return err
	}
	output, err := os.Create(filepath.Join(work, "output"))
	if err != nil {
		return err
	}
	programs := filepath.Join(work, "programs")
	database := embeddedpostgres.NewDatabase(config.
		Version(embeddedVersion).
		Port(uint32(port)).
		CachePath(filepath.Join(work, "archive")).
		BinariesPath(programs).
		RuntimePath(filepath.Join(work, "runtime")).
		Logger(output))
	done := make(chan error, 1)
	go func() { done <- errors.Join(startAndStop(database), output.Close()) }()
	select {
	case <-ctx.Done(): // the library knows no context: its request is left to end by itself
		return context.Cause(ctx)
	case err := <-done:
		if checkBinDir(filepath.Join(programs, "bin")) == nil {
			return nil
		}
		return err
	}
}

func startAndStop(database *embeddedpostgres.EmbeddedPostgres) error {
	if err := database.Start(); err != nil {
		return err
	}
	return database.Stop()
}
