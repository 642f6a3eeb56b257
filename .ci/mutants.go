// Mutants checks that the short tests notice mistakes. It applies each line of .ci/mutants.tsv to a clean checkout of
// HEAD, one after the other, and runs the test that must fail:
//
//	go run .ci/mutants.go [m01,m13]
//	go run .ci/mutants.go -texts
//
// The second form only checks that the text of each line is in its file once, as make lint does.
//
// Only the test that the line names can kill a mutant: it fails, panics or exceeds its timeout. Without a mutant it
// must pass three times within that timeout. If it passes with its mutant, the whole package runs, and the output names
// the tests that fail instead. The exit status is 1 if a mutant is not killed or does not compile, or if a line of the
// list is wrong.
//
// The checkout stays in the user's cache directory, so that Go's build cache is warm in the next run.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

const (
	listFile      = ".ci/mutants.tsv"
	killerTimeout = time.Minute
	wholeTimeout  = 10 * time.Minute
)

// mutant is a line of the list.
type mutant struct {
	id, file, text, replacement string
	directory                   string // of the package with the killer
	killer                      string // a test, or test/subtest
	breaks                      string
}

// checkout is a clone of the repository.
type checkout struct {
	dir      string
	binaries string // a temporary directory
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, strings.Join(os.Args[1:], ",")); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, only string) error {
	if only == "-texts" {
		list, err := read("")
		return errors.Join(append(stale(".", list), err)...)
	}
	list, err := read(only)
	if err != nil {
		return err
	}
	c, unlock, err := prepare(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	defer os.RemoveAll(c.binaries)
	defer c.restore(context.WithoutCancel(ctx))
	if err := c.check(ctx, list); err != nil {
		return err
	}

	began, alive := time.Now(), []string{}
	for _, m := range list {
		began := time.Now()
		verdict, killed := c.try(ctx, m)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if !killed {
			alive = append(alive, m.id)
		}
		fmt.Printf("%s  %s  %.1f s\n", m.id, verdict, time.Since(began).Seconds())
	}
	fmt.Printf("%d mutants, %d killed, in %.0f s\n", len(list), len(list)-len(alive), time.Since(began).Seconds())
	if len(alive) > 0 {
		return fmt.Errorf("not killed: %s", strings.Join(alive, " "))
	}
	return nil
}

// read returns the mutants of the list, or only those with the given ids.
func read(only string) (list []mutant, err error) {
	data, err := os.ReadFile(listFile)
	if err != nil {
		return nil, err
	}
	ids := strings.FieldsFunc(only, func(r rune) bool { return r == ',' || r == ' ' })
	unescape := strings.NewReplacer(`\\`, `\`, `\t`, "\t", `\n`, "\n")
	seen := map[string]bool{}
	for n, line := range strings.Split(strings.TrimRight(string(data), "\n"), "\n") {
		if n == 0 { // the names of the columns
			continue
		}
		f := strings.Split(line, "\t")
		if len(f) != 7 || slices.Contains(f, "") && f[3] != "" || seen[f[0]] {
			return nil, fmt.Errorf("%s:%d: want seven fields, none of them empty but the replacement, and an id that no other "+
				"line has", listFile, n+1)
		}
		seen[f[0]] = true
		if len(ids) == 0 || slices.Contains(ids, f[0]) {
			list = append(list, mutant{f[0], f[1], unescape.Replace(f[2]), unescape.Replace(f[3]), f[4], f[5], f[6]})
		}
	}
	for _, id := range ids {
		if !seen[id] {
			return nil, fmt.Errorf("%s has no mutant %s", listFile, id)
		}
	}
	return list, nil
}

// prepare makes or updates the clone, and locks it until unlock is called.
func prepare(ctx context.Context) (c *checkout, unlock func(), err error) {
	root, err := output(ctx, ".", "git", "rev-parse", "--show-toplevel")
	if err != nil {
		return nil, nil, err
	}
	if changes, _ := output(ctx, root, "git", "status", "--porcelain", "--", ":!"+listFile); changes != "" {
		fmt.Println("Uncommitted changes are not tested: the mutants are those of HEAD.")
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, nil, err
	}
	c = &checkout{dir: filepath.Join(cache, "pgratelimit-mutants",
		strings.ReplaceAll(root, string(filepath.Separator), "_"))}
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return nil, nil, err
	}
	lock, err := os.Create(c.dir + ".lock")
	if err != nil {
		return nil, nil, err
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, nil, fmt.Errorf("%s is in use by another run: %w", c.dir, err)
	}
	head, err := output(ctx, root, "git", "rev-parse", "HEAD")
	for _, args := range [][]string{
		{"init", "--quiet"},
		{"fetch", "--quiet", "--depth=1", "--no-tags", root, "HEAD"},
		{"checkout", "--quiet", "--force", "--detach", head},
		{"clean", "--quiet", "-ffdx"},
	} {
		if err == nil {
			_, err = output(ctx, c.dir, "git", args...)
		}
	}
	if err == nil {
		c.binaries, err = os.MkdirTemp("", "mutants")
	}
	return c, func() { lock.Close() }, err
}

// stale returns an error for each mutant whose text is not in its file exactly once.
func stale(dir string, list []mutant) (wrong []error) {
	for _, m := range list {
		data, err := os.ReadFile(filepath.Join(dir, m.file))
		if n := strings.Count(string(data), m.text); err != nil || n != 1 {
			wrong = append(wrong, fmt.Errorf("%s: %s has this text %d times instead of once; correct the line in %s: %q", m.id,
				m.file, n, listFile, m.text))
		}
	}
	return wrong
}

// check returns an error unless each text is in its file exactly once, and each killer runs and passes without a
// mutant, three times.
func (c *checkout) check(ctx context.Context, list []mutant) error {
	wrong := stale(c.dir, list)
	killers := map[string][]string{}
	for _, m := range list {
		killers[m.directory] = append(killers[m.directory], m.killer)
	}
	for directory, names := range killers {
		if err := c.build(ctx, directory); err != nil {
			wrong = append(wrong, err)
			continue
		}
		slices.Sort(names)
		for _, name := range slices.Compact(names) {
			out, err := c.test(ctx, directory, killerTimeout, "-test.v", "-test.count=3", "-test.run", pattern(name))
			if err != nil || strings.Count(out, "--- PASS: "+name+" (") != 3 {
				wrong = append(wrong, fmt.Errorf("without a mutant, %s in %s does not pass:\n%s", name, directory, tail(out)))
			}
		}
	}
	return errors.Join(wrong...)
}

// try returns the fate of the mutant, and whether its killer kills it.
func (c *checkout) try(ctx context.Context, m mutant) (verdict string, killed bool) {
	defer c.restore(context.WithoutCancel(ctx))
	err := c.apply(m)
	if err == nil {
		err = c.build(ctx, m.directory)
	}
	if err != nil {
		return "BUILD FAILED: " + err.Error(), false
	}
	out, err := c.test(ctx, m.directory, killerTimeout, "-test.run", pattern(m.killer))
	switch {
	case err == nil:
		out, _ = c.test(ctx, m.directory, wholeTimeout)
		return fmt.Sprintf("SURVIVED %s: %s. Other tests that fail: %q", m.killer, m.breaks, failed.FindAllString(out, -1)),
			false
	case strings.Contains(out, "panic: test timed out"):
		return "killed by the timeout of " + m.killer, true
	case strings.Contains(out, "--- FAIL: "+m.killer+" ("):
		return "killed by " + m.killer, true
	case strings.Contains(out, "panic: "): // a goroutine that the test started
		return "killed by a panic of " + m.killer, true
	}
	return "NOT TESTED: " + tail(out), false
}

var failed = regexp.MustCompile(`(?m)^\s*--- FAIL: \S+`)

// apply puts the mutant in the checkout.
func (c *checkout) apply(m mutant) error {
	path := filepath.Join(c.dir, m.file)
	data, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path, []byte(strings.Replace(string(data), m.text, m.replacement, 1)), 0o600)
	}
	return err
}

// restore undoes apply.
func (c *checkout) restore(ctx context.Context) {
	if _, err := output(ctx, c.dir, "git", "checkout", "--quiet", "--force", "."); err != nil {
		panic(err) // the next mutant would be two
	}
}

// build compiles the tests of a directory.
func (c *checkout) build(ctx context.Context, directory string) error {
	_, err := output(ctx, c.dir, "go", "test", "-c", "-ldflags=-s -w", "-o", c.binary(directory), "./"+directory)
	return err
}

func (c *checkout) binary(directory string) string {
	return filepath.Join(c.binaries, strings.ReplaceAll(directory, "/", "_"))
}

// test runs the short tests of a directory that build has compiled.
func (c *checkout) test(ctx context.Context, directory string, timeout time.Duration,
	args ...string) (out string, err error) {
	args = append([]string{"-test.short", "-test.failfast", "-test.parallel=4", "-test.timeout=" + timeout.String()},
		args...)
	return combined(ctx, filepath.Join(c.dir, directory), c.binary(directory), args...)
}

// pattern returns the pattern of -test.run for one test.
func pattern(name string) string {
	parts := strings.Split(name, "/")
	for i, part := range parts {
		parts[i] = "^" + regexp.QuoteMeta(part) + "$"
	}
	return strings.Join(parts, "/")
}

// output runs a program and returns its output. Its error ends with the last lines of the output.
func output(ctx context.Context, dir, program string, args ...string) (string, error) {
	out, err := combined(ctx, dir, program, args...)
	if err != nil {
		err = fmt.Errorf("%s %s: %w\n%s", program, strings.Join(args, " "), err, tail(out))
	}
	return strings.TrimSpace(out), err
}

// combined runs a program until it ends. When ctx ends it interrupts the program, and waits for it.
func combined(ctx context.Context, dir, program string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = dir
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	out, err := cmd.CombinedOutput()
	return string(out), cmp.Or(ctx.Err(), err)
}

// tail returns the last lines of s.
func tail(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(lines[max(len(lines)-20, 0):], "\n")
}
