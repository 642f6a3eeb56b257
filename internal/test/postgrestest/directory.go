//go:build unix

package postgrestest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
)

// watchdogScript waits until its input ends, because the process at the other end has closed it or has ended in any
// way. Then it stops the server and deletes its directory $1.
const watchdogScript = `
trap '' INT HUP TERM
read -r line
cd /
pid=$(head -n 1 "$1/data/postmaster.pid" 2>/dev/null)
if [ -n "$pid" ]; then
	kill -QUIT "$pid" 2>/dev/null
	tries=0
	while [ -f "$1/data/postmaster.pid" ] && kill -0 "$pid" 2>/dev/null && [ "$tries" -lt 2000 ]; do
		sleep 0.05
		tries=$((tries + 1))
	done
fi
rm -rf "$1"
`

type watchdog struct {
	cmd   *exec.Cmd
	input io.Closer
}

// startWatchdog runs a script that waits until its input ends.
func startWatchdog(user *account, script string, args ...string) (*watchdog, error) {
	// No context: it has to outlive this process.
	cmd := user.command(context.Background(), "/", "sh", append([]string{"-c", script, "postgrestest-watchdog"}, args...)...)
	input, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("start the watchdog: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the watchdog: %w", err)
	}
	return &watchdog{cmd: cmd, input: input}, nil
}

// Close returns when the server is down and its directory is gone.
func (w *watchdog) Close() error {
	if err := errors.Join(w.input.Close(), w.cmd.Wait()); err != nil {
		return fmt.Errorf("clean up by the watchdog: %w", err)
	}
	return nil
}

// directories are where a server may have its directory: in memory if a tmpfs has room for it, unless it must be on
// disk.
func directories(onDisk bool) []string {
	parents := []string{os.TempDir(), "/var/tmp"} // root's own TMPDIR may be closed to the server's user
	if !onDisk && tmpfsHasRoom("/dev/shm") {
		parents = append([]string{"/dev/shm"}, parents...)
	}
	return parents
}

// makeDir makes an empty directory that user can enter and remove, in the first parent where that is possible.
func makeDir(ctx context.Context, user *account, parents []string) (string, error) {
	var failed error
	for _, parent := range parents {
		dir, err := os.MkdirTemp(parent, "pgratelimit-")
		if err != nil {
			failed = errors.Join(failed, err)
			continue
		}
		err = user.own(dir)
		if err == nil {
			_, err = user.run(ctx, "/", "sh", "-c", `cd "$1" && test -w "$2"`, "sh", dir, parent)
		}
		if err == nil {
			return dir, nil
		}
		failed = errors.Join(failed, err, os.RemoveAll(dir))
	}
	return "", fmt.Errorf("make a directory for the server: %w", failed)
}
