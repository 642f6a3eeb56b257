// Command shape prints numbers that say how hard the code is to read, and fails when one is above its budget.
//
//	go run ./internal/shape [-check|-update] [-walk=false] [-v regexp] [-dir path] [-budget file] [-against revision]
//
// The core is ratelimit, internal/bucket, internal/store and internal/batch. The numbers are
//
//   - core/lines, core/files, core/exported, core/sql, and the same for each package with Go files: lines and files without tests;
//     exported names, of which the fields of a struct are none; SQL files, and SQL statements in strings;
//   - methods of Limiter, Session and Terms, and the exported ones among them;
//   - branches: conditions in the core that name a mechanism, outside the files of that mechanism (branches.go lists them);
//   - phrases: unclear phrases (phrases.txt lists them) for 1,000 words in the comments of the core, in all comments, and in pages;
//   - walk: files that a call enters and how often it returns to one, counted by bench/walk, which needs a Postgres.
//
// The budget is a line for each number, in .ci/shape.txt. With -check the program prints only the numbers above their budget, with
// the items that are new since the last commit that changed the budget. -against names another revision. With -update it lowers the
// budget to the numbers, unless one rose.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"syscall"
)

// options are the flags of the program.
type options struct {
	dir, budget, against string
	list                 *regexp.Regexp // the numbers whose items are listed; nil: none
	check, update, walk  bool
}

func main() {
	o, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err == nil {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		err = run(ctx, os.Stdout, o)
		stop()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func parse(args []string) (o options, err error) {
	flags := flag.NewFlagSet("shape", flag.ContinueOnError)
	flags.StringVar(&o.dir, "dir", ".", "the `path` of the checkout to count in")
	flags.StringVar(&o.budget, "budget", "", "the `file` of the budget; empty: .ci/shape.txt of the checkout")
	flags.StringVar(&o.against, "against", "", "the `revision` that -check compares with; empty: the last one that changed the budget")
	flags.BoolVar(&o.check, "check", false, "fail when a number is above its budget")
	flags.BoolVar(&o.update, "update", false, "lower the budget to the numbers")
	flags.BoolVar(&o.walk, "walk", true, "count walks, which needs a Postgres")
	flags.Func("v", "list what is counted in the numbers whose names match this `regexp`", func(text string) (err error) {
		o.list, err = regexp.Compile(text)
		return err
	})
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if flags.NArg() > 0 || o.check && o.update || o.list != nil && (o.check || o.update) {
		return o, errors.New("shape takes flags only, and only one of -check, -update and -v")
	}
	if o.budget == "" {
		o.budget = filepath.Join(o.dir, ".ci", "shape.txt")
	}
	return o, nil
}

// run counts, and prints, checks or updates.
func run(ctx context.Context, w io.Writer, o options) error {
	t, err := readTree(o.dir)
	if err != nil {
		return err
	}
	n, walked := measure(t), false
	if o.walk {
		if walked, err = countWalks(ctx, n, o.dir); err != nil {
			return err
		}
	}
	b, err := readBudget(o.budget)
	if err != nil {
		return err
	}
	switch {
	case o.list != nil:
		list(w, n, o.list)
	case o.check:
		return check(ctx, w, o, b, n)
	case o.update:
		updated, err := b.lowered(n, walked)
		if err != nil {
			return err
		}
		return os.WriteFile(o.budget, []byte(updated.String()), 0o644)
	default:
		show(w, b, n)
	}
	return nil
}

// show prints the numbers beside their budget.
func show(w io.Writer, b budget, n numbers) {
	fmt.Fprintf(w, "%-60s %8s %8s\n", "", "now", "budget")
	for _, of := range n.sorted() {
		allowed, mark := "-", ""
		if value, ok := b[of.name]; ok {
			allowed = format(value)
		}
		switch {
		case of.value > b[of.name]:
			mark = "  above"
		case of.value < b[of.name]:
			mark = "  below"
		}
		fmt.Fprintf(w, "%-60s %8s %8s%s\n", of.name, format(of.value), allowed, mark)
	}
}

// list prints the items of the numbers whose names match.
func list(w io.Writer, n numbers, names *regexp.Regexp) {
	for _, of := range n.sorted() {
		if !names.MatchString(of.name) {
			continue
		}
		fmt.Fprintf(w, "%s %s\n", of.name, format(of.value))
		for _, i := range of.items {
			fmt.Fprintf(w, "  %s\n", i)
		}
	}
}
