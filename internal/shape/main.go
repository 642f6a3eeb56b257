// Command shape prints numbers that say how hard the code is to read.
//
//	go run ./internal/shape [-walk=false] [-v regexp] [-dir path]
//
// The core is ratelimit, internal/bucket, internal/store and internal/batch. The numbers are
//
//   - core/lines, core/files, core/exported, core/sql, and the same for each package with Go files: lines and files without tests;
//     exported names, of which the fields of a struct are none; SQL files, and SQL statements in strings;
//   - methods of Limiter, Session and Terms, and the exported ones among them;
//   - branches: conditions in the core that name a mechanism, outside the files of that mechanism (branches.go lists them);
//   - walk: files that a call enters and how often it returns to one, counted by bench/walk, which needs a Postgres.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"syscall"
)

// options are the flags of the program.
type options struct {
	dir  string
	list *regexp.Regexp // the numbers whose items are listed; nil: none
	walk bool
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
	flags.BoolVar(&o.walk, "walk", true, "count walks, which needs a Postgres")
	flags.Func("v", "list what is counted in the numbers whose names match this `regexp`", func(text string) (err error) {
		o.list, err = regexp.Compile(text)
		return err
	})
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if flags.NArg() > 0 {
		return o, errors.New("shape takes flags only")
	}
	return o, nil
}

// run counts, and prints all numbers, or the items of some.
func run(ctx context.Context, w io.Writer, o options) error {
	t, err := readTree(o.dir)
	if err != nil {
		return err
	}
	n := measure(t)
	if o.walk {
		if err := countWalks(ctx, n, o.dir); err != nil {
			return err
		}
	}
	for _, of := range n.sorted() {
		switch {
		case o.list == nil:
			fmt.Fprintf(w, "%-60s %8d\n", of.name, of.value)
		case o.list.MatchString(of.name):
			fmt.Fprintf(w, "%s %d\n", of.name, of.value)
			for _, i := range of.items {
				fmt.Fprintf(w, "  %s\n", i)
			}
		}
	}
	return nil
}
