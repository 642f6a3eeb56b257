// Command across measures transactions of InTx that want one bucket from several processes, beside what Postgres does with a
// row lock at READ COMMITTED.
//
//	go run ./across [-processes 8] [-workers 4] [-body 2ms] [-rounds 5] [-for 2s] [-leadin 500ms] [-readfirst] [-named]
//
// The processes are real ones. In each round every way to do it has all of them for a while, one way after the other, and
// begins with another way than the round before: figures are to be compared within a run. What a way does in its first
// moments is not counted: every worker begins at the same one, and who has met nobody for a second has forgotten it.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/bench/internal/command"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

// options are what the program is asked to do. A worker process gets them in its environment.
type options struct {
	Processes, Workers, Rounds int
	Body, For, LeadIn          time.Duration
	ReadFirst, Named           bool
	URL                        string
}

// environment holds the options of a worker process.
const environment = "RATELIMIT_BENCH_ACROSS"

// measured is what a worker process did in one round in one way.
type measured struct {
	Attempts int
	Elapsed  time.Duration   // until the last transaction that had begun was over
	Samples  []time.Duration // of each commit
}

func main() { command.Run("across", parse, start) }

func parse(args []string) (o options, err error) {
	flags := flag.NewFlagSet("across", flag.ContinueOnError)
	flags.IntVar(&o.Processes, "processes", 8, "how many processes")
	flags.IntVar(&o.Workers, "workers", 4, "how many goroutines each has")
	flags.IntVar(&o.Rounds, "rounds", 5, "how often")
	flags.DurationVar(&o.Body, "body", 2*time.Millisecond, "how long a transaction sleeps after it has taken")
	flags.DurationVar(&o.For, "for", 2*time.Second, "how long a way is measured in a round")
	flags.BoolVar(&o.ReadFirst, "readfirst", false, "have each transaction read something before it takes")
	flags.BoolVar(&o.Named, "named", false, "have each transaction of InTx name its bucket before")
	flags.DurationVar(&o.LeadIn, "leadin", 500*time.Millisecond, "how long a way runs before it is measured")
	return o, command.Parse(flags, args)
}

// start measures, or works for another process that does.
func start(ctx context.Context, o options) error {
	given := os.Getenv(environment)
	if given == "" {
		return measure(ctx, os.Stdout, o)
	}
	if err := json.Unmarshal([]byte(given), &o); err != nil {
		return err
	}
	return work(ctx, o, os.Stdin, os.Stdout)
}

// measure starts a server and the processes, and writes a line for each way.
func measure(ctx context.Context, w io.Writer, o options) (err error) {
	postgres, err := server.StartPostgres(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, postgres.Close()) }()
	database, err := postgres.NewDatabase(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, database.Drop(ctx)) }()
	o.URL = database.URL()
	const table = `CREATE TABLE counter (id int PRIMARY KEY, value bigint NOT NULL) WITH (fillfactor = 50); INSERT INTO counter VALUES (1, 0)`
	if _, err := database.Admin().Exec(ctx, table); err != nil {
		return err
	}
	workers := make([]*worker, o.Processes)
	for i := range workers {
		if workers[i], err = startWorker(ctx, o); err != nil {
			return err
		}
		defer workers[i].stop()
	}
	rounds := make(map[string][]figures)
	for n := range o.Rounds + 1 {
		for i := range ways() {
			way := ways()[(i+n)%len(ways())]
			f, err := runAll(workers, way)
			if err != nil {
				return err
			}
			if n > 0 { // the first is to warm up
				rounds[way] = append(rounds[way], f)
			}
		}
	}
	return report(w, o, rounds)
}

// worker is a process that measures.
type worker struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	answers *json.Decoder
}

func startWorker(ctx context.Context, o options) (*worker, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	given, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, program)
	cmd.Env, cmd.Stderr = append(os.Environ(), environment+"="+string(given)), os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	return &worker{cmd, in, json.NewDecoder(bufio.NewReader(out))}, cmd.Start()
}

func (w *worker) stop() {
	_ = w.in.Close()
	_ = w.cmd.Wait()
}

// figures are those of one way in one round, of all processes.
type figures struct{ throughput, attempts, p50, p99 float64 }

// runAll has all workers do it that way at the same time.
func runAll(workers []*worker, way string) (figures, error) {
	for _, w := range workers {
		if _, err := fmt.Fprintln(w.in, way); err != nil {
			return figures{}, err
		}
	}
	var all []time.Duration
	attempts, elapsed := 0, time.Duration(0)
	for _, w := range workers {
		var m measured
		if err := w.answers.Decode(&m); err != nil {
			return figures{}, err
		}
		attempts += m.Attempts
		elapsed = max(elapsed, m.Elapsed)
		all = append(all, m.Samples...)
	}
	slices.Sort(all)
	return figures{
		throughput: float64(len(all)) / elapsed.Seconds(), attempts: float64(attempts) / float64(len(all)),
		p50: stats.Percentile(all, 50).Seconds() * 1e3, p99: stats.Percentile(all, 99).Seconds() * 1e3,
	}, nil
}

// report writes the median over the rounds of each figure, and of its ratio to that of raw in the same round.
func report(w io.Writer, o options, rounds map[string][]figures) error {
	if _, err := fmt.Fprintf(w, "%d processes x %d workers, body %v, read first: %v, named: %v; medians of %d rounds\n",
		o.Processes, o.Workers, o.Body, o.ReadFirst, o.Named, o.Rounds); err != nil {
		return err
	}
	for _, way := range ways() {
		of := func(figure func(f, raw figures) float64) float64 {
			values := make([]float64, 0, o.Rounds)
			for i, f := range rounds[way] {
				values = append(values, figure(f, rounds[raw][i]))
			}
			slices.Sort(values)
			return values[len(values)/2]
		}
		_, err := fmt.Fprintf(w, "%-9s %7.0f/s (%.2f x raw)  %.3f attempts  p50 %6.1f ms  p99 %6.1f ms (%.2f x raw)\n", way,
			of(func(f, _ figures) float64 { return f.throughput }), of(func(f, raw figures) float64 { return f.throughput / raw.throughput }),
			of(func(f, _ figures) float64 { return f.attempts }), of(func(f, _ figures) float64 { return f.p50 }),
			of(func(f, _ figures) float64 { return f.p99 }), of(func(f, raw figures) float64 { return f.p99 / raw.p99 }))
		if err != nil {
			return err
		}
	}
	return nil
}
