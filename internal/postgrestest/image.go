//go:build unix

package postgrestest

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/pgratelimit/pgratelimit/migrations"
)

// An image is the data directory of a stopped server that has the template database, in the user's cache directory. Other servers begin
// with a copy, which takes a tenth of the time of initdb and the migrations.
const (
	imagePrefix = "image-"
	imageLock   = "lock"

	// keptImages is how many images the cache keeps, of some 45 MB each: enough for five versions of Postgres in two checkouts.
	keptImages = 10
	// leftoverAge is the age at which an unfinished image is deleted: no process takes that long to write one.
	leftoverAge = time.Hour
)

// initdbArgs are the arguments of initdb besides the directory.
func initdbArgs() []string {
	return []string{"-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"}
}

// begin makes the data directory from the image in cache. If there is no usable image, it makes one first. If that fails, for example
// because cache cannot be written, initdb makes the data directory.
func (c *cluster) begin(ctx context.Context, cache string) error {
	if cache != "" {
		err := c.beginFromImage(ctx, cache)
		if err == nil || ctx.Err() != nil {
			return err
		}
	}
	if err := os.RemoveAll(c.data()); err != nil {
		return fmt.Errorf("remove an incomplete data directory: %w", err)
	}
	return c.initialize(ctx)
}

func (c *cluster) beginFromImage(ctx context.Context, cache string) error {
	cfg, err := Migrations()
	if err != nil {
		return err
	}
	key, err := imageKey(c.binDir, cfg)
	if err != nil {
		return err
	}
	image := filepath.Join(cache, imagePrefix+key)
	if _, err := os.Stat(image); err != nil {
		if err := addImage(ctx, c.binDir, cfg, image); err != nil {
			return err
		}
	}
	_ = os.Chtimes(image, time.Now(), time.Now()) // if it fails, the image is deleted sooner
	if err := copyDirectory(ctx, image, c.data()); err != nil || c.user == nil {
		return err
	}
	return filepath.WalkDir(c.data(), func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return c.user.own(path)
	})
}

// addImage makes an image, unless another process does so meanwhile.
func addImage(ctx context.Context, binDir string, cfg migrations.Config, image string) error {
	cache := filepath.Dir(image)
	if err := os.MkdirAll(cache, 0o700); err != nil {
		return err
	}
	unlock, err := lockFile(ctx, filepath.Join(cache, imageLock))
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := os.Stat(image); err == nil {
		return nil
	}
	defer cleanCache(cache)
	return makeImage(ctx, binDir, cfg, image)
}

// copyDirectory copies a directory with its permissions.
func copyDirectory(ctx context.Context, from, to string) error {
	if out, err := exec.CommandContext(ctx, "cp", "-R", from, to).CombinedOutput(); err != nil {
		return fmt.Errorf("copy %s: %w: %s", from, err, out)
	}
	return nil
}

// imageKey returns the name of an image. It depends on the server programs in binDir, the arguments of initdb, the time zone, from
// which initdb takes a setting, and all sources of the template. It returns an error if these sources are not on this machine.
func imageKey(binDir string, cfg migrations.Config) (string, error) {
	hash := sha256.New()
	dir, err := filepath.EvalSymlinks(binDir)
	if err != nil {
		return "", err
	}
	for _, program := range []string{"initdb", "postgres"} {
		info, err := os.Stat(filepath.Join(dir, program))
		if err != nil {
			return "", err
		}
		fmt.Fprintln(hash, dir, program, info.Size(), info.ModTime().UnixNano())
	}
	sum, err := migrationsSum()
	if err != nil {
		return "", err
	}
	fmt.Fprintln(hash, initdbArgs(), os.Getenv("TZ"), sum, cfg)
	_, file, _, _ := runtime.Caller(0)
	own := filepath.Dir(file)
	root := filepath.Join(own, "..", "..")
	for _, source := range []string{filepath.Join(own, "*.go"), filepath.Join(root, "migrations", "*.go"), filepath.Join(root, "go.mod")} {
		if err := addSources(hash, source); err != nil {
			return "", err
		}
	}
	return hex.EncodeToString(hash.Sum(nil))[:24], nil
}

// addSources adds the files that match pattern, except tests, to hash.
func addSources(hash io.Writer, pattern string) error {
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		return fmt.Errorf("an image needs the sources, in the directory where they were compiled: no %s: %w", pattern, errors.Join(err, fs.ErrNotExist))
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		content, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		fmt.Fprintf(hash, "%s %d\n%s", filepath.Base(file), len(content), content)
	}
	return nil
}

// lockFile locks a file until unlock is called or this process ends.
func lockFile(ctx context.Context, path string) (unlock func(), err error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { _ = file.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) || !pause(ctx) {
			return nil, fmt.Errorf("lock %s: %w", path, errors.Join(err, context.Cause(ctx), file.Close()))
		}
	}
}

// makeImage starts a server, and makes an image of its data. The image appears under its name when it is complete.
func makeImage(ctx context.Context, binDir string, cfg migrations.Config, image string) (err error) {
	maker, err := newCluster(ctx, binDir, Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, maker.remove(context.WithoutCancel(ctx))) }()
	if err := maker.initialize(ctx); err != nil {
		return err
	}
	configuration, err := os.ReadFile(maker.configFile())
	if err != nil {
		return err
	}
	if err := maker.startOnFreePort(ctx, nil); err != nil {
		return err
	}
	server, err := maker.server(ctx)
	if err != nil {
		return err
	}
	if _, err := ensureTemplate(ctx, server, cfg); err != nil {
		return err
	}
	if err := maker.stop(ctx, Fast); err != nil {
		return err
	}
	if err := os.WriteFile(maker.configFile(), configuration, 0o600); err != nil {
		return err
	}
	unfinished := filepath.Join(filepath.Dir(image), "unfinished-"+randomName(8))
	if err := copyDirectory(ctx, maker.data(), unfinished); err != nil {
		return errors.Join(err, os.RemoveAll(unfinished))
	}
	return os.Rename(unfinished, image)
}

// cleanCache deletes all images except the most recently used, and files that unfinished writes left behind.
func cleanCache(cache string) {
	entries, _ := os.ReadDir(cache) // an error leaves them for the next time
	var images []fs.FileInfo
	for _, entry := range entries {
		info, err := entry.Info()
		switch {
		case err != nil: // deleted meanwhile
		case strings.HasPrefix(info.Name(), imagePrefix):
			images = append(images, info)
		case info.Name() != imageLock && time.Since(info.ModTime()) > leftoverAge:
			_ = os.RemoveAll(filepath.Join(cache, info.Name()))
		}
	}
	slices.SortFunc(images, func(a, b fs.FileInfo) int { return cmp.Compare(b.ModTime().UnixNano(), a.ModTime().UnixNano()) })
	for _, old := range images[min(keptImages, len(images)):] {
		_ = os.RemoveAll(filepath.Join(cache, old.Name()))
	}
}
