//go:build unix

package postgrestest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/jackc/pgx/v5"
)

// StartStandby starts a streaming replica of a server of StartOwn or StartWith, with the primary's settings and then
// the settings of opts. It returns when the replica accepts read-only connections. SELECT pg_promote() makes a primary
// of it. It ends with the test.
func (s *Server) StartStandby(t testing.TB, opts Options) *Server {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), setupTimeout)
	defer cancel()
	standby, err := s.startStandby(ctx, opts)
	if err != nil {
		GiveUp(t, fmt.Errorf("start a standby: %w", err))
	}
	closeInTheEnd(t, standby)
	return standby
}

func (s *Server) startStandby(ctx context.Context, opts Options) (_ *Server, err error) {
	primary, ok := s.host.(*cluster)
	if !ok {
		return nil, errNotHere
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
	if err := c.copyOf(ctx, primary, s.url); err != nil {
		return nil, err
	}
	if err := c.startOnFreePort(ctx, opts.Settings); err != nil {
		return nil, err
	}
	return c.server(ctx)
}

// copyOf makes the data of a standby, as pg_basebackup does, which is not part of every installation. What the primary
// has logged meanwhile, the standby asks it for.
func (c *cluster) copyOf(ctx context.Context, primary *cluster, primaryURL string) error {
	conn, err := pgx.Connect(ctx, primaryURL)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	begin, end := `SELECT pg_backup_start('standby', true)`, `SELECT labelfile FROM pg_backup_stop(false)`
	var before15 bool
	if err := conn.QueryRow(ctx,
		`SELECT current_setting('server_version_num')::integer < 150000`).Scan(&before15); err != nil {
		return err
	}
	if before15 {
		begin, end = `SELECT pg_start_backup('standby', true, false)`, `SELECT labelfile FROM pg_stop_backup(false, false)`
	}
	if _, err := conn.Exec(ctx, begin); err != nil {
		return fmt.Errorf("begin a backup: %w", err)
	}
	data := c.data()
	if _, err := c.user.run(ctx, c.dir, "cp", "-a", primary.data(), data); err != nil {
		return err
	}
	var label string
	if err := conn.QueryRow(ctx, end).Scan(&label); err != nil {
		return fmt.Errorf("end a backup: %w", err)
	}
	_, err = c.user.run(ctx, c.dir, "sh", "-c", `
		cd "$1" && rm postmaster.pid postmaster.opts && find pg_wal pg_replslot -type f -delete &&
		printf %s "$2" >backup_label && printf "primary_conninfo = '%s'\n" "$3" >>postgresql.auto.conf && touch standby.signal`,
		"sh", data, label, primaryURL)
	return err
}

// Disk returns the directory that all which the server writes is in.
func (s *Server) Disk() (string, error) {
	c, ok := s.host.(*cluster)
	if !ok {
		return "", errNotHere
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
		t.Fatal(errNotHere)
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
