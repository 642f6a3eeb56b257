// Command testrun runs go test and says which tests it skipped, and why.
//
//	go run ./internal/testrun [-brief] [-expect FILE] [-slow 1s] -- -short ./...
//
// Everything after -- goes to go test. It prints a line for each package, the output of each failed test, and at the end one line
// for each reason to skip. -brief prints one line for all tests of a longer tier (see package testsize). With -expect, a reason
// that matches no line of FILE fails the run, because a skipped test looks like a passed one.
package main

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"time"
)

func main() {
	brief := flag.Bool("brief", false, "print one line for the tests of each longer tier")
	expect := flag.String("expect", "", "a file with a regular expression for each expected reason to skip, one a line")
	slow := flag.Duration("slow", 0, "print the tests that took longer; 0 prints none")
	flag.Parse()
	ok, err := run(*brief, *expect, *slow, flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "testrun:", err)
	}
	if !ok || err != nil {
		os.Exit(1)
	}
}

// run reports whether every test passed and every skip was expected.
func run(brief bool, expect string, slow time.Duration, args []string) (bool, error) {
	expected, err := readExpected(expect)
	if err != nil {
		return false, err
	}
	//nolint:noctx // it runs until go test ends
	cmd := exec.Command("go", append([]string{"test", "-json"}, args...)...)
	cmd.Stderr = os.Stderr
	// A binary with the race detector otherwise waits a second before it exits.
	cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0 "+os.Getenv("GORACE"))
	out, err := cmd.StdoutPipe()
	if err != nil {
		return false, fmt.Errorf("run go test: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return false, fmt.Errorf("run go test: %w", err)
	}
	r := newReport(os.Stdout, brief)
	readErr := r.read(out)
	waitErr := cmd.Wait()
	if readErr != nil {
		return false, fmt.Errorf("read the output of go test: %w", readErr)
	}
	r.slowTests(slow)
	unexpected := r.summary(expected)
	return waitErr == nil && len(unexpected) == 0, nil
}

// readExpected returns nil for no file: every reason is expected.
func readExpected(file string) ([]*regexp.Regexp, error) {
	if file == "" {
		return nil, nil
	}
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("read the expected reasons: %w", err)
	}
	defer func() { _ = f.Close() }() // it was only read
	return parseExpected(f)
}

func parseExpected(r io.Reader) ([]*regexp.Regexp, error) {
	expected := []*regexp.Regexp{}
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		line := strings.TrimSpace(lines.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		pattern, err := regexp.Compile(line)
		if err != nil {
			return nil, fmt.Errorf("an expected reason: %w", err)
		}
		expected = append(expected, pattern)
	}
	return expected, lines.Err()
}
