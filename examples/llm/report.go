package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
)

// report prints what came of the run, and returns an error that names each promise that was not kept.
func (p *play) report(ctx context.Context) error {
	f, err := p.measure(ctx)
	if err != nil {
		return err
	}
	f.print(p.w, p.refused, p.backend.limits)
	if err := f.judge(p.way(), p.backend.limits); err != nil {
		return err
	}
	fmt.Fprintln(p.w, "\nEverything is as promised.")
	if f.longestWay > p.way() {
		fmt.Fprintf(p.w, "This machine was too busy to promise that the upstream refuses nothing: there must be no more than %s from\n"+
			"the start of work until the upstream has it, and there were %s.\n", ms(p.way()), ms(f.longestWay))
	}
	return nil
}

// print prints the figures; refused is how often users were refused by their own limits.
func (f *figures) print(w io.Writer, refused int, limits limits) {
	line := func(what, format string, args ...any) {
		fmt.Fprintf(w, "%-15s %s\n", what, fmt.Sprintf(format, args...))
	}
	fmt.Fprintln(w)
	line("upstream", "refused %d requests", f.refused)
	if f.overloaded {
		line("overload", "turned away %d requests while it asked to be left alone", f.turnedAway)
	}
	line("utilisation", "%.1f %% of its tokens, %.0f %% of its requests; %.1f %% of its tokens in the fullest minute", 100*f.tokens, 100*f.requests, 100*f.fullest)
	line("jobs", "%d done, %d lost, %d run twice", len(f.allWaits), f.lost, f.twice)
	line("tokens", "%d reserved - %d given back + %d charged on top = %d settled; the upstream counted %d", f.reserved, f.surplus, f.overage, f.settled, f.metered)
	line("sent", "p50 %s, p95 %s, at most %s after the moment reserved", ms(percentile(f.late, 0.5)), ms(percentile(f.late, 0.95)), ms(percentile(f.late, 1)))
	line("way", "at most %s from the start of a job until the upstream had it", ms(f.longestWay))
	line("moved", "%d jobs came up too late and reserved again", f.moved)
	line("slots", "put off %d times, until the user had one free", f.slotless)
	line("users", "refused %d times by limits of their own, and asked again", refused)
	line("large requests", "the %d of over %d tokens, numbered as asked, in the order served:", len(f.served), large)
	fmt.Fprint(w, inLines(f.served))

	fmt.Fprintf(w, "\n%-15s %-4s %9s %8s %8s %8s %9s\n", "waits", "plan", "questions", "p50", "p95", "longest", "at once")
	for _, u := range users() {
		fmt.Fprintf(w, "%-15s %-4s %9d %s %4d of %d\n", u.name, u.plan, len(f.waits[u.name]), spread(f.waits[u.name]), f.atOnce[u.name], limits.slotsOf(u))
	}
	fmt.Fprintf(w, "%-15s %-4s %9d %s\n", "everybody", "", len(f.allWaits), spread(f.allWaits))
}

// judge returns an error for each promise that was not kept. That the upstream refuses nothing, and that nobody is
// overtaken, is promised where the way to the upstream takes no longer than it may: how long it takes is the machine's.
// So are the utilisation and the waits, which are printed and not judged. Neither is promised after an overload: what was
// reserved for the time of the pause is ready at its end.
func (f *figures) judge(way time.Duration, limits limits) error {
	var errs []error
	expect := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	inTime := f.longestWay <= way && !f.overloaded
	expect(f.refused == 0 || !inTime, "the upstream refused %d requests, want none", f.refused)
	expect(f.stale == 0, "%d jobs were started although their moment was long over, want none", f.stale)
	expect(f.lost == 0, "%d jobs were lost, want none", f.lost)
	expect(f.twice == 0, "%d jobs ran twice, want none", f.twice)
	expect(f.open == 0, "%d reservations were not settled, want none", f.open)
	expect(f.settled == f.metered, "%d tokens were settled, but the upstream counted %d", f.settled, f.metered)
	expect(f.overtaken == 0 || !inTime, "%d large requests were overtaken by one reserved for later, want none", f.overtaken)
	for _, u := range users() {
		expect(f.atOnce[u.name] <= limits.slotsOf(u), "the upstream had %d questions of the %s at once, want %d at most", f.atOnce[u.name], u.name, limits.slotsOf(u))
	}
	return errors.Join(errs...)
}

// slotsOf returns how many slots a user has.
func (l limits) slotsOf(u user) int { return int(l.plans[u.plan].atOnce.Capacity()) }

// spread returns the columns p50, p95 and longest.
func spread(waits []time.Duration) string {
	return fmt.Sprintf("%8s %8s %8s", seconds(percentile(waits, 0.5)), seconds(percentile(waits, 0.95)), seconds(percentile(waits, 1)))
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.1f s", d.Seconds()) }

func ms(d time.Duration) string { return fmt.Sprintf("%d ms", d.Milliseconds()) }

// inLines returns the numbers in lines that fit a terminal.
func inLines(numbers []int) string {
	const perLine = 20
	var b strings.Builder
	for i, n := range numbers {
		if i%perLine == 0 {
			fmt.Fprintf(&b, "%-15s", "")
		}
		fmt.Fprintf(&b, " %d", n)
		if i%perLine == perLine-1 || i == len(numbers)-1 {
			b.WriteByte('\n')
		}
	}
	return b.String()
}
