//go:build unix

package postgrestest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Clock moves what a server takes the time to be, while it runs.
type Clock struct {
	file    string
	library string
}

// NewClock returns a clock that shows the machine's time, for a server that is started with its Env. Without
// libfaketime the test is skipped, with the reason, at a desk, and fails when CI is set.
func NewClock(t testing.TB) *Clock {
	t.Helper()
	c, err := newClock(t.Context())
	if err != nil {
		GiveUp(t, err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(filepath.Dir(c.file)); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	c.Set(t, 0)
	return c
}

func newClock(ctx context.Context) (*Clock, error) {
	library, err := findFaketime([]string{
		"/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib/faketime/libfaketime.so.1", "/usr/lib64/faketime/libfaketime.so.1",
		"/usr/local/lib/faketime/libfaketime.so.1",
	})
	if err != nil {
		return nil, err
	}
	user, err := serverAccount()
	if err != nil {
		return nil, err
	}
	dir, err := makeDir(ctx, user, false)
	if err != nil {
		return nil, err
	}
	return &Clock{file: filepath.Join(dir, "offset"), library: library}, nil
}

// findFaketime returns the first library that matches one of the patterns.
func findFaketime(patterns []string) (string, error) {
	for _, pattern := range patterns {
		if found, err := filepath.Glob(pattern); err == nil && len(found) > 0 {
			return found[0], nil
		}
	}
	return "", errNoClock
}

// Env is what a server is started with, in Options, to go by the clock. Its timers, which go by the monotonic clock, do
// not.
func (c *Clock) Env() []string {
	return []string{
		"LD_PRELOAD=" + c.library, "FAKETIME_TIMESTAMP_FILE=" + c.file, "FAKETIME_NO_CACHE=1",
		"FAKETIME_DONT_FAKE_MONOTONIC=1",
	}
}

// Set makes the clock differ from the machine's by ahead, from now on.
func (c *Clock) Set(t testing.TB, ahead time.Duration) {
	t.Helper()
	next := c.file + ".next" // put in place as a whole: the server reads the file at every look at its clock
	err := os.WriteFile(next, fmt.Appendf(nil, "%+.6f", ahead.Seconds()), 0o644)
	if err == nil {
		err = os.Rename(next, c.file)
	}
	if err != nil {
		t.Fatalf("set the server's clock: %v", err)
	}
}
