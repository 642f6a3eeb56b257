// Command bench measures the limiter against what it is compared with, on servers that it starts, and says which
// of its bars it reached. How fast anything is does not change the exit status: that is not 0 when a scenario
// could not be measured, or when more or less was taken from a limit than was admitted.
//
//	go run . [-quick] [-json] [-run regexp] [-rounds n] [-seconds s]
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
	"time"

	"github.com/pgratelimit/pgratelimit/bench/internal/report"
	"github.com/pgratelimit/pgratelimit/bench/internal/scenario"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
)

// options are what the program is asked to do.
type options struct {
	quick, json bool
	only        *regexp.Regexp
	rounds      int
	round       time.Duration
}

// A run for figures to quote, and one that takes less than a minute.
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
	err = run(ctx, os.Stdout, os.Stderr, o)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func parse(args []string) (o options, err error) {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.BoolVar(&o.quick, "quick", false, "take less than a minute; the figures are not to be quoted")
	flags.BoolVar(&o.json, "json", false, "write JSON in place of tables")
	only := flags.String("run", "", "measure only the scenarios whose names match this `regexp`")
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

// run measures, and writes the tables to w as they come and the progress of a JSON run to progress.
func run(ctx context.Context, w, progress io.Writer, o options) (err error) {
	scenarios := chosen(o)
	if len(scenarios) == 0 {
		return fmt.Errorf("no scenario matches %q", o.only)
	}
	postgres, err := server.StartPostgres(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, postgres.Close()) }()
	redis, err := server.StartRedis(ctx)
	if err != nil && !errors.Is(err, server.ErrNoRedis) {
		return err
	}
	described := report.Run{
		Postgres: postgres.Version, Settings: postgres.Settings(), Rounds: o.rounds, Round: o.round, Quick: o.quick, Redis: "no Redis",
	}
	if redis != nil {
		defer func() { err = errors.Join(err, redis.Close()) }()
		described.Redis = redis.Version + ", which keeps nothing on disk"
	} else {
		described.Redis = err.Error()
	}
	if described.Machine, err = server.Describe(ctx, postgres.Directory); err != nil {
		return err
	}
	if o.json {
		described.Results, err = measure(ctx, progress, scenarios, scenario.Servers{Postgres: postgres, Redis: redis}, o)
		return errors.Join(err, report.JSON(w, described))
	}
	report.Header(w, described)
	described.Results, err = measure(ctx, w, scenarios, scenario.Servers{Postgres: postgres, Redis: redis}, o)
	report.Summary(w, described.Results)
	return err
}

// chosen returns the scenarios that were asked for.
func chosen(o options) []scenario.Scenario {
	var chosen []scenario.Scenario
	for _, s := range scenario.All(o.quick) {
		if o.only.MatchString(s.Name) {
			chosen = append(chosen, s)
		}
	}
	return chosen
}

// measure runs the scenarios one after the other, and the rest when one fails, until ctx ends.
func measure(ctx context.Context, w io.Writer, scenarios []scenario.Scenario, on scenario.Servers, o options) ([]scenario.Result, error) {
	var results []scenario.Result
	var failed error
	for _, s := range scenarios {
		result, err := s.Run(ctx, on, scenario.Options{Rounds: o.rounds, Round: o.round})
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", s.Name, err))
			if ctx.Err() != nil {
				break
			}
			continue
		}
		report.Result(w, result)
		results = append(results, result)
	}
	return results, failed
}
