// Command adaptive shows an adaptive limit beside a fixed one and none at all: twenty workers in four processes each, on
// one Postgres, call an upstream over HTTP that takes 100 requests a second, then 40, then 100 again, and answers 429 beyond.
// It says how much of what each upstream could have accepted it accepted, and how much of what was sent it throttled, and
// draws the path of the share that the price leaves.
//
//	go run ./adaptive [-third 40s] [-runs 1] [-svg ../docs/images/adaptive.svg]
//
// A run takes three thirds, and all three ways run in it at once. How good the figures are does not change the exit status.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"github.com/pgratelimit/pgratelimit/bench/internal/command"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
)

const (
	processes        = 4
	workers          = 5 // of each process
	contract, fallen = 100, 40
	sampleEvery      = 250 * time.Millisecond
)

// The ways to call an upstream.
const (
	adaptiveWay = "adaptive"
	staticWay   = "static"
	ungatedWay  = "ungated"
)

// options are what the program is asked to do.
type options struct {
	third         time.Duration
	runs          int
	svg           string
	way, upstream string // of a worker process
}

func main() {
	command.Run("adaptive", parse, func(ctx context.Context, o options) error {
		if o.way != "" {
			return work(ctx, o)
		}
		return compare(ctx, os.Stdout, o)
	})
}

func parse(args []string) (o options, err error) {
	flags := flag.NewFlagSet("adaptive", flag.ContinueOnError)
	flags.DurationVar(&o.third, "third", 40*time.Second, "how long each capacity of the upstream lasts")
	flags.IntVar(&o.runs, "runs", 1, "how often to run")
	flags.StringVar(&o.svg, "svg", "../docs/images/adaptive.svg", "the `file` for the drawing of the last run; empty: none")
	flags.StringVar(&o.way, "way", "", "work in this `way`, for another process")
	flags.StringVar(&o.upstream, "upstream", "", "the `address` to call, for another process")
	if err := command.Parse(flags, args); err != nil {
		return o, err
	}
	if o.third < time.Second || o.runs < 1 {
		return o, errors.New("-third must be a second or more, and -runs 1 or more")
	}
	return o, nil
}

// compare runs all three ways, and prints what came of them.
func compare(ctx context.Context, w io.Writer, o options) (err error) {
	postgres, err := server.StartPostgres(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, postgres.Close()) }()
	fmt.Fprintf(w, "%s; %d processes with %d workers; %d, %d and %d requests a second for %v each\n",
		postgres.Version, processes, workers, contract, fallen, contract, o.third)
	fmt.Fprintf(w, "%-4s %-9s %8s %10s %10s\n", "run", "way", "goodput", "throttled", "requests")
	for run := range o.runs {
		path, err := once(ctx, w, postgres, run+1, o)
		if err != nil {
			return err
		}
		if run == o.runs-1 && o.svg != "" {
			if err := os.WriteFile(o.svg, draw(path, o.third), 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}

// once runs all three ways at once, each against an upstream of its own.
func once(ctx context.Context, w io.Writer, postgres *server.Postgres, run int, o options) (path path, err error) {
	database, err := postgres.NewDatabase(ctx)
	if err != nil {
		return path, err
	}
	defer func() { err = errors.Join(err, database.Drop(context.WithoutCancel(ctx))) }()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	begun := time.Now()
	var upstreams []*upstream
	var children []*exec.Cmd
	for _, way := range []string{adaptiveWay, staticWay, ungatedWay} {
		u, err := listen(begun, o.third)
		if err != nil {
			return path, err
		}
		defer u.close()
		upstreams = append(upstreams, u)
		for range processes {
			child, err := start(ctx, way, u.address, database.URL(), o)
			if err != nil {
				return path, err
			}
			children = append(children, child)
		}
	}
	path, err = follow(ctx, database.Admin(), upstreams[0], begun, o.third)
	for _, child := range children {
		err = errors.Join(err, child.Wait())
	}
	if err != nil {
		return path, err
	}
	for i, way := range []string{adaptiveWay, staticWay, ungatedWay} {
		accepted, throttled := upstreams[i].counts()
		could := o.third.Seconds() * (contract + fallen + contract)
		fmt.Fprintf(w, "%-4d %-9s %8.3f %9.2f%% %10d\n", run, way, float64(accepted)/could,
			100*float64(throttled)/float64(max(accepted+throttled, 1)), accepted+throttled)
	}
	return path, nil
}

// start starts a process with workers.
func start(ctx context.Context, way, address, url string, o options) (*exec.Cmd, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	child := exec.CommandContext(ctx, program, "-way", way, "-upstream", address, "-third", o.third.String())
	child.Env = append(os.Environ(), "RATELIMIT_DATABASE_URL="+url)
	child.Stderr = os.Stderr
	return child, child.Start()
}
