// Command walk counts the files of the core that a reader opens to follow one call. internal/shape prints the counts.
//
//	go run ./walk [-v]
//
// It builds itself with a marked copy of the core: every function of ratelimit, internal/bucket, internal/batch and
// internal/store begins with a println of its file and name. The copy is an overlay, so no file of the checkout
// changes. The built program makes each call several times, on a Postgres that is found or started as for the tests.
// The last run counts: by then the statements are prepared. For a call in the caller's transaction, WithTx and the
// transaction are not part of the walk; for InTx they are.
//
//   - files: files in which a function was entered
//   - changes: entries in another file than the entry before
//   - back: changes into a file that was entered before
//   - calls: entries. A function literal is part of the function around it, and a return is no entry.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/bench/internal/command"
)

type options struct {
	verbose bool
	record  bool // make the calls (set in the built program)
}

func main() {
	command.Run("walk", parse, func(ctx context.Context, o options) error {
		if o.record {
			return record(ctx)
		}
		return walk(ctx, os.Stdout, o)
	})
}

func parse(args []string) (o options, err error) {
	flags := flag.NewFlagSet("walk", flag.ContinueOnError)
	flags.BoolVar(&o.verbose, "v", false, "list the functions that each call enters")
	flags.BoolVar(&o.record, "record", false, "make the calls; for the marked program")
	return o, command.Parse(flags, args)
}

// walk builds and runs the marked program, and writes a line for each call.
func walk(ctx context.Context, w io.Writer, o options) (err error) {
	directory, err := os.MkdirTemp("", "walk")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(directory)) }()
	root, err := exec.CommandContext(ctx, "git", "rev-parse", "--show-toplevel").Output()
	if err != nil {
		return fmt.Errorf("find the checkout: %w", err)
	}
	module, program := strings.TrimSpace(string(root)), filepath.Join(directory, "program")
	list, err := overlay(module, directory)
	if err != nil {
		return err
	}
	build := exec.CommandContext(ctx, "go", "-C", filepath.Join(module, "bench"), "build", "-buildvcs=false", "-overlay",
		list, "-o", program, "./walk")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build the marked program: %w: %s", err, out)
	}
	c := exec.CommandContext(ctx, program, "-record")
	c.Cancel = func() error { return c.Process.Signal(os.Interrupt) }
	c.WaitDelay = time.Minute // to drop its database and stop its server
	var marks bytes.Buffer
	c.Stderr = &marks
	if err := c.Run(); err != nil {
		text := marks.String()
		return fmt.Errorf("make the calls: %w: %s", err, text[max(0, len(text)-1000):])
	}
	fmt.Fprintf(w, "%-14s %7s %7s %7s %7s\n", "", "files", "changes", "back", "calls")
	for _, r := range read(&marks) {
		f := count(r.entries)
		fmt.Fprintf(w, "%-14s %7d %7d %7d %7d\n", r.name, len(f.files), f.changes, f.back, f.calls)
		if o.verbose {
			fmt.Fprintf(w, "  %s\n", strings.Join(r.entries, "\n  "))
		}
	}
	return nil
}

// The marks on standard error begin with one of these words.
const (
	beginMark = "walk-begin"
	enterMark = "walk-enter"
	endMark   = "walk-end"
)

// overlay writes the marked copy of the core to directory, and returns the file for go build -overlay.
func overlay(module, directory string) (string, error) {
	replaced := map[string]string{}
	for _, part := range []string{"ratelimit", "internal/bucket", "internal/batch", "internal/store"} {
		files, err := filepath.Glob(filepath.Join(module, part, "*.go"))
		if err != nil {
			return "", err
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			source, err := os.ReadFile(file)
			if err != nil {
				return "", err
			}
			text, err := mark(path.Join(part, filepath.Base(file)), string(source))
			if err != nil {
				return "", err
			}
			replaced[file] = filepath.Join(directory, fmt.Sprintf("%d.go", len(replaced)))
			if err := os.WriteFile(replaced[file], []byte(text), 0o600); err != nil {
				return "", err
			}
		}
	}
	text, err := json.Marshal(map[string]any{"Replace": replaced})
	if err != nil {
		return "", err
	}
	list := filepath.Join(directory, "overlay.json")
	return list, os.WriteFile(list, text, 0o600)
}

// mark returns the source of the file with a println at the beginning of each function.
func mark(file, source string) (string, error) {
	set := token.NewFileSet()
	parsed, err := parser.ParseFile(set, file, source, parser.SkipObjectResolution)
	if err != nil {
		return "", fmt.Errorf("mark: %w", err)
	}
	for _, declaration := range slices.Backward(parsed.Decls) {
		if f, ok := declaration.(*ast.FuncDecl); ok && f.Body != nil {
			at := set.Position(f.Body.Lbrace).Offset + 1
			source = source[:at] + fmt.Sprintf(" println(%q);", enterMark+" "+file+" "+f.Name.Name) + source[at:]
		}
	}
	return source, nil
}

// recording is the last run of a call. Each entry is "file function".
type recording struct {
	name    string
	entries []string
}

// read reads the marks.
func read(marks io.Reader) (all []recording) {
	isOn := false
	for lines := bufio.NewScanner(marks); lines.Scan(); {
		switch word, rest, _ := strings.Cut(lines.Text(), " "); {
		case word == beginMark:
			if len(all) == 0 || all[len(all)-1].name != rest {
				all = append(all, recording{name: rest})
			}
			isOn, all[len(all)-1].entries = true, nil
		case word == endMark:
			isOn = false
		case word == enterMark && isOn:
			all[len(all)-1].entries = append(all[len(all)-1].entries, rest)
		}
	}
	return all
}

type figures struct {
	files                []string // in the order of their first entry
	changes, back, calls int
}

func count(entries []string) figures {
	f := figures{calls: len(entries)}
	last := ""
	for _, e := range entries {
		file, _, _ := strings.Cut(e, " ")
		isNew := !slices.Contains(f.files, file)
		if last != "" && file != last {
			f.changes++
			if !isNew {
				f.back++
			}
		}
		if isNew {
			f.files = append(f.files, file)
		}
		last = file
	}
	return f
}
