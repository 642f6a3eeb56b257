package against

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/rpc"
	"os"
	"os/exec"

	"github.com/pgratelimit/pgratelimit/bench/internal/contender"
	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/bench/internal/scenario"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
)

// Process measures the first contender of a scenario in a program that calls Work.
type Process struct {
	Program   string
	Arguments []string // make the program call Work
	Postgres  string   // the server's connection string
}

// Open starts the process and waits until it is ready.
func (p Process) Open(ctx context.Context, _ contender.Bench) (contender.Runner, error) {
	c := exec.CommandContext(ctx, p.Program, p.Arguments...)
	c.Env = append(os.Environ(), "RATELIMIT_DATABASE_URL="+p.Postgres)
	c.Stderr = os.Stderr
	input, err := c.StdinPipe()
	if err != nil {
		return nil, err
	}
	output, err := c.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.Start(); err != nil {
		return nil, err
	}
	r := remote{rpc.NewClient(pipe{output, input}), c.Wait}
	if err := r.Check(ctx); err != nil { // before the first call
		return nil, errors.Join(fmt.Errorf("the process of the other limiter: %w", err), r.Close())
	}
	return r, nil
}

// pipe is a connection over the standard input and output of a process.
type pipe struct {
	io.Reader
	io.WriteCloser
}

// remote is a Runner in another process.
type remote struct {
	client *rpc.Client
	wait   func() error
}

func (r remote) Run(_ context.Context, amount load.Amount) (round contender.Round, err error) {
	return round, r.client.Call("Worker.Run", amount, &round)
}

func (r remote) Check(context.Context) error {
	return r.client.Call("Worker.Check", struct{}{}, &struct{}{})
}

func (r remote) Close() error { return errors.Join(r.client.Close(), r.wait()) }

// worker serves a Runner to another process.
type worker struct {
	run   func(load.Amount) (contender.Round, error)
	check func() error
}

// Run makes a round of calls.
func (w worker) Run(amount load.Amount, round *contender.Round) (err error) {
	*round, err = w.run(amount)
	return err
}

// Check checks the calls so far.
func (w worker) Check(struct{}, *struct{}) error { return w.check() }

// Work measures the first contender of the scenario for the process at the other end of in and out, until in ends. It
// uses its own database on the server of RATELIMIT_DATABASE_URL.
func Work(ctx context.Context, s scenario.Scenario, in io.Reader, out io.WriteCloser) (err error) {
	postgres, err := server.FindPostgres(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, postgres.Close()) }() // another process's server keeps running
	database, err := postgres.NewDatabase(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, database.Drop(ctx)) }()
	runner, err := s.Contenders[0].Way.Open(ctx, contender.Bench{
		Database: database, Meter: server.NewMeter(postgres, os.Getpid()), Name: "contender0", Callers: s.Callers,
		Burst: s.Burst, Disk: s.Disk,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, runner.Close()) }()
	if err := database.Settle(ctx); err != nil {
		return err
	}
	serving := rpc.NewServer()
	w := worker{
		run:   func(amount load.Amount) (contender.Round, error) { return runner.Run(ctx, amount) },
		check: func() error { return runner.Check(ctx) },
	}
	if err := serving.RegisterName("Worker", w); err != nil {
		return err
	}
	serving.ServeConn(pipe{in, out})
	return nil
}
