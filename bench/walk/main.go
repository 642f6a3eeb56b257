// Command walk counts how many files of the core a reader walks through who follows one call, for a handful of calls.
//
//	go run ./walk [-rev revision] [-run regexp] [-v]
//
// It counts in the working tree, or in a revision, and changes neither: every function and method of the Go files of
// ratelimit and of internal/bucket, internal/batch and internal/store, where they exist, is built with one call at its
// entry, which records its file. Tests, and packages below these directories, are left out. Each scenario is run
// several times, on a Postgres that is found or started as for the tests, so that its statements are prepared and the
// Limiter remembers what it does; the last run counts, and nothing else goes on in it. The
// requests (Limit.For) and the Limiter of a caller's transaction (WithTx) are made before; where InTx begins the
// transaction, WithTx, BEGIN and COMMIT are part of the call. From the files in the order in which functions were entered follow
//
//   - files: how many were entered;
//   - changes: how often an entry is in another file than the one before it;
//   - back: how many of the changes lead into a file that was entered before, changes - (files - 1);
//   - calls: how many functions and methods were entered. Function literals are part of the function around them.
//
// Returns are not recorded: a function that goes on after a call into another file is no change back to its own.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/bench/internal/command"
)

const interruptGrace = time.Minute // for the recorded program to drop its database and to stop its server

// options are what the program is asked to do.
type options struct {
	revision string // empty: the working tree
	only     string
	verbose  bool
}

// entry is a function that was entered.
type entry struct {
	File, Function string
}

// recording is what the recorded program writes for a scenario.
type recording struct {
	Scenario string
	Entries  []entry
}

// figures are what is counted in a recording.
type figures struct {
	files                []string // in the order of their first entry
	changes, back, calls int
}

func main() {
	command.Run("walk", parse, func(ctx context.Context, o options) error { return walk(ctx, os.Stdout, o) })
}

func parse(args []string) (o options, err error) {
	flags := flag.NewFlagSet("walk", flag.ContinueOnError)
	flags.StringVar(&o.revision, "rev", "", "the `revision` to count in; empty: the working tree")
	flags.StringVar(&o.only, "run", "", "count the scenarios whose names match this `regexp`")
	flags.BoolVar(&o.verbose, "v", false, "list what was entered")
	if err := command.Parse(flags, args); err != nil {
		return o, err
	}
	_, err = regexp.Compile(o.only)
	return o, err
}

// walk builds the recorded program in a temporary directory, runs it, and writes a line for each scenario.
func walk(ctx context.Context, w io.Writer, o options) (err error) {
	directory, err := os.MkdirTemp("", "walk")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(directory)) }()
	program, err := build(ctx, directory, o.revision)
	if err != nil {
		return err
	}
	recordings, err := record(ctx, program, o.only)
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "%-14s %7s %7s %7s %7s\n", "", "files", "changes", "back", "calls")
	for _, r := range recordings {
		f := count(r.Entries)
		fmt.Fprintf(w, "%-14s %7d %7d %7d %7d\n", r.Scenario, len(f.files), f.changes, f.back, f.calls)
		if o.verbose {
			list(w, r.Entries, f)
		}
	}
	return nil
}

// build returns the program that records, made in directory.
func build(ctx context.Context, directory, revision string) (string, error) {
	root, err := output(exec.CommandContext(ctx, "git", "rev-parse", "--show-toplevel"))
	if err != nil {
		return "", err
	}
	module := strings.TrimSpace(root)
	if revision != "" {
		if module, err = checkout(ctx, module, revision, directory); err != nil {
			return "", err
		}
	}
	replaced, err := overlay(module, directory)
	if err != nil {
		return "", err
	}
	program := filepath.Join(directory, "program")
	_, err = output(exec.CommandContext(ctx, "go", "-C", module, "build", "-buildvcs=false", "-overlay", replaced, "-o", program, "./"+programDirectory))
	return program, err
}

// record runs the program and returns what it wrote. When ctx ends, the program is told to clean up.
func record(ctx context.Context, program, only string) (recordings []recording, err error) {
	c := exec.CommandContext(ctx, program, only)
	c.Cancel = func() error { return c.Process.Signal(os.Interrupt) }
	c.WaitDelay = interruptGrace
	text, err := output(c)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal([]byte(text), &recordings); err != nil {
		return nil, fmt.Errorf("read what was recorded: %w", err)
	}
	if len(recordings) == 0 {
		return nil, fmt.Errorf("no scenario matches %q", only)
	}
	return recordings, nil
}

// output runs a command and returns what it wrote.
func output(c *exec.Cmd) (string, error) {
	var failed strings.Builder
	c.Stderr = &failed
	text, err := c.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", strings.Join(c.Args, " "), err, strings.TrimSpace(failed.String()))
	}
	return string(text), nil
}

// count returns the figures of a recording.
func count(entries []entry) figures {
	f := figures{calls: len(entries)}
	entered := map[string]bool{}
	for i, e := range entries {
		if i > 0 && e.File != entries[i-1].File {
			f.changes++
			if entered[e.File] {
				f.back++
			}
		}
		if !entered[e.File] {
			entered[e.File] = true
			f.files = append(f.files, e.File)
		}
	}
	return f
}

// list writes the entries, a line for those that follow each other in one file, and the files.
func list(w io.Writer, entries []entry, f figures) {
	for i, e := range entries {
		if i == 0 || e.File != entries[i-1].File {
			fmt.Fprintf(w, "\n  %s:", e.File)
		}
		fmt.Fprint(w, " ", e.Function)
	}
	fmt.Fprintf(w, "\n\n  %d files: %s\n\n", len(f.files), strings.Join(f.files, " "))
}
