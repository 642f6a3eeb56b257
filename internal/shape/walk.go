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

// countWalks runs bench/walk of the checkout, which starts a Postgres or uses one as the tests do. It counts the files
// that a call enters, and how often it returns to one of them. A checkout without bench/walk has none.
func countWalks(ctx context.Context, n numbers, root string) error {
	bench := filepath.Join(root, "bench")
	if _, err := os.Stat(filepath.Join(bench, "walk")); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	c := exec.CommandContext(ctx, "go", "-C", bench, "run", "./walk")
	var failed strings.Builder
	c.Stderr = &failed
	out, err := c.Output()
	if err != nil {
		return fmt.Errorf("bench/walk: %w: %s", err, strings.TrimSpace(failed.String()))
	}
	return readWalks(n, string(out))
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
		files, err := strconv.Atoi(fields[1])
		back, err2 := strconv.Atoi(fields[3])
		if err := errors.Join(err, err2); err != nil {
			return err
		}
		n.define("walk/" + fields[0] + "/files").value = files
		n.define("walk/" + fields[0] + "/back").value = back
	}
	return lines.Err()
}
