// Package against has the limiter of another commit as a contender: this module, built with that commit's limiter, in a
// process of its own.
package against

import (
	"context"
	"encoding/json"
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
	// What measures is this checkout's on both sides: only the limiter differs.
	bench := filepath.Join(worktree, "bench")
	if err := os.RemoveAll(bench); err != nil {
		return "", err
	}
	if err := os.CopyFS(bench, os.DirFS(filepath.Join(root, "bench"))); err != nil {
		return "", err
	}
	if err := forget(ctx, bench); err != nil {
		return "", err
	}
	program = filepath.Join(directory, "against")
	_, err = output(ctx, "env", "GOWORK=off", "go", "-C", bench, "build", "-mod=mod", "-o", program, ".")
	return program, err
}

// forget has bench's go.mod name no module that the commit has as packages of another.
func forget(ctx context.Context, bench string) error {
	text, err := output(ctx, "go", "-C", bench, "mod", "edit", "-json")
	if err != nil {
		return err
	}
	var mod struct {
		Replace []struct{ Old, New struct{ Path string } }
	}
	if err := json.Unmarshal([]byte(text), &mod); err != nil {
		return fmt.Errorf("read bench/go.mod: %w", err)
	}
	for _, r := range mod.Replace {
		_, err := os.Stat(filepath.Join(bench, r.New.Path, "go.mod"))
		if !errors.Is(err, os.ErrNotExist) {
			continue
		}
		if _, err := output(ctx, "go", "-C", bench, "mod", "edit", "-droprequire="+r.Old.Path, "-dropreplace="+r.Old.Path); err != nil {
			return err
		}
	}
	return nil
}

// output runs a command and returns what it wrote.
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
