// Command partitions measures the costs and savings of a partitioned table of buckets.
//
//	go run ./partitions [-rows 1000000] [-partitions 1,8,16,64] [-callers 1,16,64] [-rounds 7] [-calls 2000]
//
// It starts its own server, and creates a database with the same rows for each number of partitions; 1 is a plain table. In each round
// the databases take turns with standalone Takes of uniformly drawn keys, from one bucket and from five. A line has the plain table's
// median of calls a second and of microseconds of the server's processor for a call. For the others it has the median ratio to the
// plain table in the same round. In the end Prune deletes a tenth of the rows, which are full, and VACUUM runs.
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
	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

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

// measure starts a server, measures on it, and writes the figures.
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
	fmt.Fprintf(w, "%s, %d keys, %d rounds of %d Takes\n", postgres.Version, o.rows, o.rounds, o.calls)
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

// takes measures Takes from so many limits. The tables take turns.
func takes(ctx context.Context, w io.Writer, o options, tables []*table, from, callers int) error {
	speeds, costs := make([][]float64, len(tables)), make([][]float64, len(tables))
	group := load.NewGroup(callers, 1)
	for round := range o.rounds + 1 {
		for i, t := range tables {
			r, err := t.take(ctx, group, from)
			if err != nil {
				return err
			}
			if round > 0 { // the first round plans the statements
				speeds[i] = append(speeds[i], float64(r.Calls)/r.Elapsed.Seconds())
				costs[i] = append(costs[i], 1e6*r.Processor/float64(r.Calls))
			}
		}
	}
	fmt.Fprintf(w, "take from %d, %2d callers: %7.0f calls/s, %6.1f us", from, callers, stats.Of(speeds[0]).Median, stats.Of(costs[0]).Median)
	for i, t := range tables[1:] {
		fmt.Fprintf(w, "; %d partitions: x %.2f calls/s, x %.2f us", t.partitions,
			stats.Ratios(speeds[i+1], speeds[0]).Median, stats.Ratios(costs[i+1], costs[0]).Median)
	}
	fmt.Fprintln(w)
	return nil
}
