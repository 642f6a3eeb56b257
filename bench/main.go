// Command bench measures the limiter and other contenders on servers that it starts. The speed does not change the exit
// status. The status is not 0 if a scenario could not be measured, or if the tokens taken from a limit differ from the
// admitted calls.
//
//	go run . [-quick] [-run regexp] [-rounds n] [-seconds s]
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

// options are the options of the program.
type options struct {
	quick  bool
	only   *regexp.Regexp // scenarios
	named  bool           // the user gave -run
	rounds int
	round  time.Duration
}

// The defaults of a full run, and of a quick run of less than a minute.
const (
	rounds, round           = 5, 2 * time.Second
	quickRounds, quickRound = 5, 100 * time.Millisecond
)

func main() {
	o, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err = run(ctx, os.Stdout, o)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func parse(args []string) (o options, err error) {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.BoolVar(&o.quick, "quick", false, "take less than a minute; the figures are not to be quoted")
	only := flags.String("run", "", "measure only the scenarios whose names match this `regexp` (default all but the "+
		"points of curves)")
	flags.IntVar(&o.rounds, "rounds", 0, "rounds of each scenario (default 5)")
	seconds := flags.Float64("seconds", 0, "how long each contender's turn in a round is (default 2)")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if flags.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if o.rounds < 0 || *seconds < 0 {
		return o, errors.New("-rounds and -seconds must be more than 0")
	}
	if o.only, err = regexp.Compile(*only); err != nil {
		return o, err
	}
	o.named = *only != ""
	o.round = time.Duration(*seconds * float64(time.Second))
	defaultRounds, defaultRound := rounds, round
	if o.quick {
		defaultRounds, defaultRound = quickRounds, quickRound
	}
	if o.rounds == 0 {
		o.rounds = defaultRounds
	}
	if o.round == 0 {
		o.round = defaultRound
	}
	return o, nil
}
