package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	embeddedpostgres "github.com/fergusstrange/embedded-postgres"
)

const embeddedVersion = embeddedpostgres.V17

// download returns the directory of a server's programs in cache, and puts them there unless they are there already. It does so
// in a directory of its own that it moves when all are there, so that several processes can do it at once.
func download(ctx context.Context, cache string) (binDir string, err error) {
	programs := filepath.Join(cache, "postgres-"+string(embeddedVersion))
	binDir = filepath.Join(programs, "bin")
	if complete(binDir) {
		return binDir, nil
	}
	// The server's user has to be able to enter the directories, when that is another user.
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	work, err := os.MkdirTemp(cache, "download-")
	if err != nil {
		return "", err
	}
	defer func() { _ = os.RemoveAll(work) }()
	if err := fetch(ctx, work); err != nil {
		return "", fmt.Errorf("download PostgreSQL %s: %w", embeddedVersion, err)
	}
	err = os.Rename(filepath.Join(work, "programs"), programs)
	if err != nil && !complete(binDir) { // another process may have been first
		return "", err
	}
	return binDir, nil
}

// complete tells whether the programs are in a directory.
func complete(binDir string) bool {
	for _, program := range []string{"initdb", "pg_ctl", "postgres"} {
		if _, err := os.Stat(filepath.Join(binDir, program)); err != nil {
			return false
		}
	}
	return true
}

// fetch has embedded-postgres put the programs into work/programs. The library downloads as a part of starting a server, which it
// cannot do as root and which is for postgrestest to do; so what counts is whether the programs are there.
func fetch(ctx context.Context, work string) error {
	port, err := freePort(ctx)
	if err != nil {
		return err
	}
	output, err := os.Create(filepath.Join(work, "output"))
	if err != nil {
		return err
	}
	programs := filepath.Join(work, "programs")
	database := embeddedpostgres.NewDatabase(embeddedpostgres.DefaultConfig().
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
		if complete(filepath.Join(programs, "bin")) {
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
