//go:build unix

package postgrestest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"strconv"
	"strings"
	"syscall"
)

// account is the user that a server runs as: nil for the user of this process. A server refuses to
// run as root.
type account struct {
	name     string
	uid, gid int
}

func serverAccount() (*account, error) {
	if os.Geteuid() != 0 {
		return nil, nil //nolint:nilnil // nil is the account of this process
	}
	for _, name := range []string{"postgres", "nobody"} {
		found, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, errUID := strconv.Atoi(found.Uid)
		gid, errGID := strconv.Atoi(found.Gid)
		if errUID == nil && errGID == nil {
			return &account{name: name, uid: uid, gid: gid}, nil
		}
	}
	return nil, errors.New("a server does not run as root, and there is neither a user postgres nor a user nobody")
}

// own makes path the account's.
func (a *account) own(path string) error {
	if a == nil {
		return nil
	}
	if err := os.Chown(path, a.uid, a.gid); err != nil {
		return fmt.Errorf("give %s to user %s: %w", path, a.name, err)
	}
	return nil
}

// command prepares a program that runs as the account, in dir, without this process's settings for
// Postgres clients, and out of reach of the terminal's Ctrl-C.
func (a *account) command(ctx context.Context, dir, program string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = dir
	cmd.Env = []string{"LC_ALL=C"}
	for _, variable := range os.Environ() {
		if !strings.HasPrefix(variable, "PG") && !strings.HasPrefix(variable, "LC_") && !strings.HasPrefix(variable, "LANG") {
			cmd.Env = append(cmd.Env, variable)
		}
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if a != nil {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(a.uid), Gid: uint32(a.gid)}
	}
	return cmd
}

// run runs a program to its end. Its output is in the error, when it fails.
func (a *account) run(ctx context.Context, dir, program string, args ...string) (string, error) {
	// A file, not a pipe: the server inherits it, and a reader of a pipe would wait until the server closes it.
	output, err := os.CreateTemp("", "postgrestest")
	if err != nil {
		return "", fmt.Errorf("run %s: %w", program, err)
	}
	defer func() { _ = errors.Join(output.Close(), os.Remove(output.Name())) }()
	cmd := a.command(ctx, dir, program, args...)
	cmd.Stdout, cmd.Stderr = output, output
	errRun := cmd.Run()
	content, err := os.ReadFile(output.Name())
	if err != nil {
		return "", fmt.Errorf("run %s: %w", program, err)
	}
	if errRun != nil {
		return "", fmt.Errorf("run %s: %w\n%s", program, errRun, lastLines(string(content)))
	}
	return string(content), nil
}
