//go:build unix

package server_test

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
)

// startStandby starts a streaming replica with the primary's settings. SELECT pg_promote() makes a primary of it.
func startStandby(t *testing.T, primary *postgrestest.Server) *postgrestest.Server {
	t.Helper()
	return postgrestest.StartWith(t, postgrestest.Options{Data: func(ctx context.Context, data string) error {
		return copyData(ctx, primary.URL(), data)
	}})
}

// copyData makes the data of a standby, as pg_basebackup does, which is not part of every installation. The standby
// asks the primary for the log that is written meanwhile.
func copyData(ctx context.Context, primaryURL, data string) error {
	conn, err := pgx.Connect(ctx, primaryURL)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	var before15 bool
	var source, label string
	const ask = `SELECT current_setting('server_version_num')::integer < 150000, current_setting('data_directory')`
	if err := conn.QueryRow(ctx, ask).Scan(&before15, &source); err != nil {
		return err
	}
	begin, end := `SELECT pg_backup_start('standby', true)`, `SELECT labelfile FROM pg_backup_stop(false)`
	if before15 {
		begin, end = `SELECT pg_start_backup('standby', true, false)`, `SELECT labelfile FROM pg_stop_backup(false, false)`
	}
	if _, err := conn.Exec(ctx, begin); err != nil {
		return fmt.Errorf("begin a backup: %w", err)
	}
	if out, err := exec.CommandContext(ctx, "cp", "-a", source, data).CombinedOutput(); err != nil {
		return fmt.Errorf("copy the primary: %w: %s", err, out)
	}
	if err := conn.QueryRow(ctx, end).Scan(&label); err != nil {
		return fmt.Errorf("end a backup: %w", err)
	}
	const change = `cd "$1" && rm postmaster.pid postmaster.opts && find pg_wal pg_replslot -type f -delete &&
		printf %s "$2" >backup_label && printf "primary_conninfo = '%s'\n" "$3" >>postgresql.auto.conf && touch standby.signal`
	if out, err := exec.CommandContext(ctx, "sh", "-c", change, "sh", data, label, primaryURL).CombinedOutput(); err != nil {
		return fmt.Errorf("make a standby of the copy: %w: %s", err, out)
	}
	info, err := os.Stat(source)
	if err != nil {
		return err
	}
	owner := info.Sys().(*syscall.Stat_t) // the server's user, where this one is root
	return filepath.WalkDir(data, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(path, int(owner.Uid), int(owner.Gid))
	})
}
