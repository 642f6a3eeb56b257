package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

const walkPrefix = "walk/"

// countWalks runs bench/walk of the checkout, which starts a Postgres or uses one as the tests do. It counts the files that a call
// enters, and how often it returns to one of them. It returns false for a checkout without bench/walk.
func countWalks(ctx context.Context, n numbers, root string) (bool, error) {
	bench := filepath.Join(root, "bench")
	if _, err := os.Stat(filepath.Join(bench, "walk")); errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	c := exec.CommandContext(ctx, "go", "-C", bench, "run", "./walk")
	var failed strings.Builder
	c.Stderr = &failed
	out, err := c.Output()
	if err != nil {
		return false, fmt.Errorf("bench/walk: %w: %s", err, strings.TrimSpace(failed.String()))
	}
	return true, readWalks(n, string(out))
}

// readWalks reads the table of bench/walk: the columns files, changes, back and calls.
func readWalks(n numbers, table string) error {
	lines := bufio.NewScanner(strings.NewReader(table))
	lines.Scan()
	if got := strings.Join(strings.Fields(lines.Text()), " "); got != "files changes back calls" {
		return fmt.Errorf("bench/walk printed the columns %q", got)
	}
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) != 5 {
			return fmt.Errorf("bench/walk printed %q", lines.Text())
		}
		files, err := strconv.ParseFloat(fields[1], 64)
		back, err2 := strconv.ParseFloat(fields[3], 64)
		if err := errors.Join(err, err2); err != nil {
			return err
		}
		n.define(walkPrefix + fields[0] + "/files").value = files
		n.define(walkPrefix + fields[0] + "/back").value = back
	}
	return lines.Err()
}
