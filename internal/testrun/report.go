package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"
)

// event is a line of go test -json; see go doc cmd/test2json.
type event struct {
	Action     string
	Package    string
	ImportPath string // in place of Package, for the output of a build
	Test       string
	Elapsed    float64 // seconds
	Output     string
}

type report struct {
	out             io.Writer
	brief           bool                // whether the tests of a longer tier have one reason
	output          map[string][]string // by test, while it is unknown whether it passes
	passed, failed  int
	skipped         map[string]int // tests by reason
	elapsed         map[string]time.Duration
	packageOfReason map[string]string // of one test with that reason
}

func newReport(out io.Writer, brief bool) *report {
	return &report{
		out: out, brief: brief, output: map[string][]string{}, skipped: map[string]int{}, elapsed: map[string]time.Duration{},
		packageOfReason: map[string]string{},
	}
}

// read consumes the output of go test -json until it ends.
func (r *report) read(in io.Reader) error {
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			r.line(line)
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// line prints a line that is not an event unchanged: for example an error of the go command.
func (r *report) line(line string) {
	var e event
	if json.Unmarshal([]byte(line), &e) != nil {
		fmt.Fprint(r.out, line)
		return
	}
	name := e.Package + " " + e.Test
	switch {
	case e.Action == "build-output":
		fmt.Fprint(r.out, e.Output)
	case e.Test == "":
		r.ofPackage(name, e)
	case e.Action == "output":
		r.output[name] = append(r.output[name], e.Output)
	case e.Action == "pass", e.Action == "fail", e.Action == "skip":
		r.end(name, e)
	}
}

// ofPackage prints the line that ends a package, and everything that a failed package printed outside of its tests.
func (r *report) ofPackage(name string, e event) {
	if e.Action == "output" {
		r.output[name] = append(r.output[name], e.Output)
		return
	}
	if e.Action != "pass" && e.Action != "fail" && e.Action != "skip" {
		return
	}
	if e.Action == "fail" {
		r.unfinished(e.Package)
	}
	for _, text := range r.output[name] {
		if e.Action == "fail" || strings.HasPrefix(text, "ok ") {
			fmt.Fprint(r.out, text)
		}
	}
	delete(r.output, name)
}

// unfinished prints the output of the tests of a package that have not ended: one of them panicked, or hung.
func (r *report) unfinished(pkg string) {
	for _, name := range slices.Sorted(maps.Keys(r.output)) {
		if of, test, _ := strings.Cut(name, " "); of == pkg && test != "" {
			r.failed++
			fmt.Fprint(r.out, strings.Join(r.output[name], ""))
			delete(r.output, name)
		}
	}
}

func (r *report) end(name string, e event) {
	output := r.output[name]
	delete(r.output, name)
	r.elapsed[name] = time.Duration(e.Elapsed * float64(time.Second))
	switch e.Action {
	case "pass":
		r.passed++
	case "fail":
		r.failed++
		fmt.Fprint(r.out, strings.Join(output, ""))
	case "skip":
		reason := reasonOf(output)
		if tier, _, found := strings.Cut(reason, ": "); r.brief && found && (tier == "long" || tier == "nightly") {
			reason = tier
		}
		r.skipped[reason]++
		r.packageOfReason[reason] = name
	}
}

// place is what t.Skip prints before the reason, for example "    setup_test.go:186: ".
var place = regexp.MustCompile(`^\s*\S+\.go:\d+: `)

// reasonOf returns the first line of the reason that a test gave to t.Skip.
func reasonOf(output []string) string {
	for _, text := range slices.Backward(output) {
		if at := place.FindString(text); at != "" {
			return strings.TrimSpace(text[len(at):])
		}
	}
	return "no reason"
}

// slowTests prints the tests that took longer than the limit, slowest first.
func (r *report) slowTests(limit time.Duration) {
	if limit == 0 {
		return
	}
	names := slices.SortedFunc(maps.Keys(r.elapsed), func(a, b string) int {
		return cmp.Or(cmp.Compare(r.elapsed[b], r.elapsed[a]), cmp.Compare(a, b))
	})
	for _, name := range names {
		if r.elapsed[name] <= limit {
			return
		}
		fmt.Fprintf(r.out, "slow: %6.2f s  %s\n", r.elapsed[name].Seconds(), name)
	}
}

// summary prints one line for each reason to skip, then the sums. It returns the reasons that match none of the expected; nil expects all.
func (r *report) summary(expected []*regexp.Regexp) (unexpected []string) {
	skips := 0
	for _, reason := range slices.Sorted(maps.Keys(r.skipped)) {
		skips += r.skipped[reason]
		fmt.Fprintf(r.out, "skipped %4d  %s\n", r.skipped[reason], reason)
		if expected != nil && !slices.ContainsFunc(expected, func(p *regexp.Regexp) bool { return p.MatchString(reason) }) {
			unexpected = append(unexpected, reason)
		}
	}
	for _, reason := range unexpected {
		fmt.Fprintf(r.out, "UNEXPECTED reason to skip %s: %s\n    Make the test run, or add the reason to the file of -expect.\n", r.packageOfReason[reason], reason)
	}
	fmt.Fprintf(r.out, "%d passed, %d failed, %d skipped\n", r.passed, r.failed, skips)
	return unexpected
}
