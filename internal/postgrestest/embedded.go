//go:build unix

package postgrestest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// startEmbedded has a server's programs downloaded once, into the user's cache directory, and then starts
// them like any other server of this machine.
func startEmbedded(ctx context.Context, opts Options, env environment) (*Server, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, fmt.Errorf("find the cache directory: %w", err)
	}
	if os.Geteuid() == 0 {
		cache = "/var/cache" // root's own is closed to the user that the server runs as
	}
	program, err := program()
	if err != nil {
		return nil, err
	}
	binDir, err := download(ctx, program, filepath.Join(cache, "pgratelimit"))
	if err != nil {
		return nil, err
	}
	opts.cache = env.cache
	server, err := startCluster(ctx, binDir, opts)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", binDir, err)
	}
	return server, nil
}

// download returns the directory in cache that the programs are in.
func download(ctx context.Context, program []string, cache string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, downloadTimeout)
	defer cancel()
	o, done, err := startOutside(ctx, program, "embedded", cache)
	if err != nil {
		return "", err
	}
	return done.BinDir, errors.Join(checkBinDir(done.BinDir), o.close())
}
