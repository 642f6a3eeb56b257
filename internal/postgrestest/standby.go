//go:build unix

package postgrestest

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"testing"
)

// StartStandby starts a streaming replica of a server that StartOwn or StartWith has started, with the primary's settings and
// those of opts on top, and returns when it takes connections to read. SELECT pg_promote() makes a primary of it. It ends with
// the test.
func (s *Server) StartStandby(t testing.TB, opts Options) *Server {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), setupTimeout)
	defer cancel()
	standby, err := s.startStandby(ctx, opts)
	if err != nil {
		giveUp(t, fmt.Errorf("start a standby: %w", err), os.Getenv("CI") != "")
	}
	closeInTheEnd(t, standby)
	return standby
}

func (s *Server) startStandby(ctx context.Context, opts Options) (_ *Server, err error) {
	primary, ok := s.host.(*cluster)
	if !ok {
		return nil, ErrNotHere
	}
	c, err := newCluster(ctx, primary.binDir, opts)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.remove(context.WithoutCancel(ctx)))
		}
	}()
	_, err = c.user.run(ctx, c.dir, filepath.Join(c.binDir, "pg_basebackup"),
		"-D", filepath.Join(c.dir, "data"), "-d", s.url, "-X", "stream", "-c", "fast", "-R", "--no-sync")
	if err != nil {
		return nil, err
	}
	if err := c.startOnFreePort(ctx, opts.Settings); err != nil {
		return nil, err
	}
	where, err := url.Parse(s.url)
	if err != nil {
		return nil, fmt.Errorf("read the primary's URL: %w", err)
	}
	password, _ := where.User.Password()
	return c.server(ctx, password)
}

// Disk returns the directory that all which the server writes is in.
func (s *Server) Disk() (string, error) {
	c, ok := s.host.(*cluster)
	if !ok {
		return "", ErrNotHere
	}
	return c.dir, nil
}

// AwaitStop returns when a server that stops by itself has stopped.
func (s *Server) AwaitStop(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), stopTimeout)
	defer cancel()
	c, ok := s.host.(*cluster)
	if !ok {
		t.Fatal(ErrNotHere)
	}
	pid, err := c.pid()
	if errors.Is(err, os.ErrNotExist) { // it has removed the file
		return
	}
	if err == nil {
		err = awaitExit(ctx, pid)
	}
	if err != nil {
		t.Fatalf("wait for %s to stop: %v", s, err)
	}
}
