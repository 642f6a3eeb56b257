// Command partitions measures what partitions of the table of buckets cost and save.
//
//	go run ./partitions [-rows 1000000] [-partitions 1,8,16,64] [-callers 1,16,64] [-rounds 7] [-calls 2000]
//
// It starts a server of its own, and makes a database for each number of partitions, 1 being a plain table, all with the same rows. Then come rounds of
// standalone Takes, from one bucket and from five, with keys that are drawn uniformly: in each round every database has its turn,
// so that what else the machine does falls on all alike. A line is the median of the plain table, in calls a second and in
// microseconds of the server's processor for a call, and for the others the median of the ratio to the plain table in the same round.
//
// In the end a tenth of the rows, which are full, is deleted by Prune and then vacuumed.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/pgratelimit/pgratelimit/bench/internal/command"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
)

// options are what the program is asked to do.
type options struct {
	rows, rounds, calls int
	partitions, callers []int
}

func main() {
	command.Run("partitions", parse, func(ctx context.Context, o options) error { return measure(ctx, os.Stdout, o) })
}

func parse(args []string) (o options, err error) {
	flags := flag.NewFlagSet("partitions", flag.ContinueOnError)
	flags.IntVar(&o.rows, "rows", 1_000_000, "how many `keys` there are")
	flags.IntVar(&o.rounds, "rounds", 7, "how many `rounds`")
	flags.IntVar(&o.calls, "calls", 2000, "how many `Takes` a round has of each kind")
	partitions := flags.String("partitions", "1,8,16,64", "the `numbers` of partitions; the first is what the others are compared with")
	callers := flags.String("callers", "1,16,64", "how `many` goroutines call")
	if err := command.Parse(flags, args); err != nil {
		return o, err
	}
	if o.rows < 100 || o.rounds < 1 || o.calls < 1 {
		return o, errors.New("use 100 rows or more, and one round and call or more")
	}
	if o.partitions, err = numbers(*partitions); err != nil {
		return o, err
	}
	o.callers, err = numbers(*callers)
	return o, err
}

func numbers(list string) (all []int, err error) {
	for text := range strings.SplitSeq(list, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			return nil, fmt.Errorf("%q is no positive number", text)
		}
		all = append(all, n)
	}
	return all, nil
}

// measure starts a server, measures on it, and writes what there is to say.
func measure(ctx context.Context, w io.Writer, o options) (err error) {
	postgres, err := server.StartPostgres(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, postgres.Close()) }()
	var tables []*table
	defer func() {
		for _, t := range tables {
			err = errors.Join(err, t.close(context.WithoutCancel(ctx)))
		}
	}()
	for _, n := range o.partitions {
		t, err := newTable(ctx, postgres, o, n)
		if err != nil {
			return fmt.Errorf("%d partitions: %w", n, err)
		}
		tables = append(tables, t)
	}
	if _, err := fmt.Fprintf(w, "%s, %d keys, %d rounds of %d Takes\n", postgres.Version, o.rows, o.rounds, o.calls); err != nil {
		return err
	}
	for _, limits := range []int{1, 5} {
		for _, callers := range o.callers {
			if err := takes(ctx, w, o, tables, limits, callers); err != nil {
				return err
			}
		}
	}
	for _, t := range tables {
		if err := t.clean(ctx, w); err != nil {
			return err
		}
	}
	return nil
}

// takes measures Takes from so many limits, by so many callers, in each table in turns.
func takes(ctx context.Context, w io.Writer, o options, tables []*table, limits, callers int) error {
	speeds, costs := make([][]float64, len(tables)), make([][]float64, len(tables))
	for round := range o.rounds + 1 {
		for i, t := range tables {
			speed, cost, err := t.take(ctx, limits, callers)
			if err != nil {
				return err
			}
			if round > 0 { // the first has the statements planned
				speeds[i], costs[i] = append(speeds[i], speed), append(costs[i], cost)
			}
		}
	}
	line := fmt.Sprintf("take from %d, %2d callers: %7.0f calls/s, %6.1f us", limits, callers, median(speeds[0]), 1e6*median(costs[0]))
	for i, t := range tables[1:] {
		line += fmt.Sprintf("; %d partitions: x %.2f calls/s, x %.2f us", t.partitions, median(ratios(speeds[i+1], speeds[0])), median(ratios(costs[i+1], costs[0])))
	}
	_, err := fmt.Fprintln(w, line)
	return err
}
