// Command compare measures this checkout against an earlier commit of it: both on one server, in turns, so that
// what else the machine does falls on both alike. It says how they compare and exits with 0 however that is.
//
//	go run ./compare [-base commit] [-run regexp] [-rounds n] [-seconds s]
//
// Each side is a process of its own, this module built against that side's limiter. Of a scenario only its first
// contender is measured, which is the limiter.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"syscall"
	"time"
)

// options are what the program is asked to do.
type options struct {
	base   string
	only   *regexp.Regexp
	rounds int
	round  time.Duration
	worker string // the scenario to measure for another process; empty: be the one that compares
}

func main() {
	o, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "compare:", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	if o.worker != "" {
		err = work(ctx, o.worker, o.round, os.Stdin, os.Stdout)
	} else {
		err = compare(ctx, os.Stdout, o)
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "compare:", err)
		os.Exit(1)
	}
}

func parse(args []string) (o options, err error) {
	flags := flag.NewFlagSet("compare", flag.ContinueOnError)
	flags.StringVar(&o.base, "base", "HEAD", "the `commit` to compare the working tree with")
	only := flags.String("run", "^(take-1|take-16|take-64|take-512|hot-512|tx-1|five-1|five-16)$", "the scenarios to measure")
	flags.IntVar(&o.rounds, "rounds", 7, "rounds of each scenario")
	seconds := flags.Float64("seconds", 1, "how long each side's turn in a round is")
	flags.StringVar(&o.worker, "worker", "", "measure this `scenario`, a round for each line of the standard input")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	switch {
	case flags.NArg() > 0:
		return o, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case o.rounds < 1 || *seconds <= 0:
		return o, errors.New("-rounds and -seconds must be more than 0")
	}
	o.round = time.Duration(*seconds * float64(time.Second))
	o.only, err = regexp.Compile(*only)
	return o, err
}
