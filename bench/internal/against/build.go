// Package against measures the limiter of another commit: it builds this module with that commit's limiter, and runs it
// as a separate process.
package against

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Build builds this module with the limiter of the commit ref into directory, and returns the program.
func Build(ctx context.Context, directory, ref string) (program string, err error) {
	root, err := output(ctx, "git", "rev-parse", "--show-toplevel")
	if err != nil {
		return "", err
	}
	worktree := filepath.Join(directory, "worktree")
	if _, err := output(ctx, "git", "-C", root, "worktree", "add", "--detach", worktree, ref); err != nil {
		return "", err
	}
	defer func() {
		_, removeErr := output(context.WithoutCancel(ctx), "git", "-C", root, "worktree", "remove", "--force", worktree)
		err = errors.Join(err, removeErr)
	}()
	// Both sides use the harness of this checkout.
	work := filepath.Join(directory, "go.work")
	text := fmt.Sprintf("go 1.26.0\nuse (\n\t%s\n\t%s\n)\n", filepath.Join(root, "bench"), worktree)
	if err := os.WriteFile(work, []byte(text), 0o600); err != nil {
		return "", err
	}
	program = filepath.Join(directory, "against")
	_, err = output(ctx, "env", "GOWORK="+work, "go", "-C", filepath.Join(root, "bench"), "build", "-o", program, ".")
	return program, err
}

// output runs a command and returns its output.
func output(ctx context.Context, name string, args ...string) (string, error) {
	var failed strings.Builder
	c := exec.CommandContext(ctx, name, args...)
	c.Stderr = &failed
	text, err := c.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(failed.String()))
	}
	return strings.TrimSpace(string(text)), nil
}
