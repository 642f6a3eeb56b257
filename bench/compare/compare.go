package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/pgratelimit/pgratelimit/bench/internal/scenario"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

// compare builds both sides, starts a server, and writes a line for each scenario.
func compare(ctx context.Context, w io.Writer, o options) (err error) {
	directory, err := os.MkdirTemp("", "compare")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(directory)) }()
	now, before, err := build(ctx, directory, o.base)
	if err != nil {
		return err
	}
	postgres, err := server.StartPostgres(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, postgres.Close()) }()
	fmt.Fprintf(w, "this checkout against %s, %s, %d rounds of %v each, in turns; medians, with the least and the most in brackets\n\n",
		o.base, postgres.Version, o.rounds, o.round)
	fmt.Fprintf(w, "%-9s %26s %26s %22s %18s %16s\n", "", "calls/s, this / base", "p50, base / this", "calls/s", "allocations", "round trips")
	for _, s := range scenario.All(false) {
		if !o.only.MatchString(s.Name) || s.Calls > 0 {
			continue
		}
		if err := one(ctx, w, s.Name, [2]string{now, before}, postgres.URL(), o); err != nil {
			return fmt.Errorf("%s: %w", s.Name, err)
		}
	}
	return nil
}

// build returns the programs that measure this checkout and the commit base.
func build(ctx context.Context, directory, base string) (now, before string, err error) {
	root, err := output(ctx, "git", "rev-parse", "--show-toplevel")
	if err != nil {
		return "", "", err
	}
	module, worktree := filepath.Join(root, "bench"), filepath.Join(directory, "base")
	now, before = filepath.Join(directory, "now"), filepath.Join(directory, "before")
	if _, err := output(ctx, "go", "-C", module, "build", "-o", now, "./compare"); err != nil {
		return "", "", err
	}
	if _, err := output(ctx, "git", "-C", root, "worktree", "add", "--detach", worktree, base); err != nil {
		return "", "", err
	}
	defer func() {
		_, removeErr := output(context.WithoutCancel(ctx), "git", "-C", root, "worktree", "remove", "--force", worktree)
		err = errors.Join(err, removeErr)
	}()
	// What measures is this checkout's on both sides: only the limiter differs.
	bench := filepath.Join(worktree, "bench")
	if err := os.RemoveAll(bench); err != nil {
		return "", "", err
	}
	if err := os.CopyFS(bench, os.DirFS(module)); err != nil {
		return "", "", err
	}
	_, err = output(ctx, "go", "-C", bench, "build", "-mod=mod", "-o", before, "./compare")
	return now, before, err
}

// output runs a command and returns what it wrote.
func output(ctx context.Context, name string, args ...string) (string, error) {
	var failed strings.Builder
	c := exec.CommandContext(ctx, name, args...)
	c.Stderr = &failed
	text, err := c.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(failed.String()))
	}
	return strings.TrimSpace(string(text)), nil
}

// side is a process that measures one side of a scenario.
type side struct {
	command *exec.Cmd
	ask     io.WriteCloser
	answers *bufio.Scanner
	rounds  []measured
}

// start starts the process, and waits until it is ready.
func start(ctx context.Context, program, scenario, url string, o options) (*side, error) {
	c := exec.CommandContext(ctx, program, "-worker", scenario, "-seconds", fmt.Sprint(o.round.Seconds()))
	c.Env = append(os.Environ(), "RATELIMIT_DATABASE_URL="+url)
	c.Stderr = os.Stderr
	ask, err := c.StdinPipe()
	if err != nil {
		return nil, err
	}
	answers, err := c.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.Start(); err != nil {
		return nil, err
	}
	s := &side{command: c, ask: ask, answers: bufio.NewScanner(answers)}
	_, err = s.answer()
	return s, err
}

func (s *side) answer() (m measured, err error) {
	if !s.answers.Scan() {
		return m, errors.Join(errors.New("the measuring process ended"), s.answers.Err())
	}
	return m, json.Unmarshal(s.answers.Bytes(), &m)
}

// round has the process measure a round.
func (s *side) round() (measured, error) {
	if _, err := io.WriteString(s.ask, "\n"); err != nil {
		return measured{}, err
	}
	return s.answer()
}

// close ends the process, which then checks what was taken.
func (s *side) close() error { return errors.Join(s.ask.Close(), s.command.Wait()) }

// one measures a scenario on both sides, after a round to warm up, and writes its line.
func one(ctx context.Context, w io.Writer, name string, programs [2]string, url string, o options) (err error) {
	var sides []*side
	defer func() {
		for _, s := range sides {
			err = errors.Join(err, s.close())
		}
	}()
	for _, program := range programs {
		s, err := start(ctx, program, name, url, o)
		if err != nil {
			return err
		}
		sides = append(sides, s)
	}
	for round := -1; round < o.rounds; round++ {
		for i := range sides {
			s := sides[(i+max(round, 0))%len(sides)]
			m, err := s.round()
			if err != nil {
				return err
			}
			if round >= 0 {
				s.rounds = append(s.rounds, m)
			}
		}
	}
	now, before := sides[0], sides[1]
	throughput, p50 := func(m measured) float64 { return m.Throughput }, func(m measured) float64 { return m.P50 }
	allocations, trips := func(m measured) float64 { return m.Allocations }, func(m measured) float64 { return m.Trips }
	fmt.Fprintf(w, "%-9s %26s %26s %10.0f, %10.0f %8.1f, %8.1f %7.2f, %7.2f\n", name,
		ratio(now, before, throughput), ratio(before, now, p50),
		now.median(throughput), before.median(throughput), now.median(allocations), before.median(allocations), now.median(trips), before.median(trips))
	return nil
}

// series returns a figure of each round.
func (s *side) series(figure func(measured) float64) []float64 {
	values := make([]float64, len(s.rounds))
	for i, m := range s.rounds {
		values[i] = figure(m)
	}
	return values
}

func (s *side) median(figure func(measured) float64) float64 {
	return stats.Of(s.series(figure)).Median
}

// ratio returns how a figure of one side compares with that of the other in the same round.
func ratio(a, b *side, figure func(measured) float64) string {
	r := stats.Ratios(a.series(figure), b.series(figure))
	return fmt.Sprintf("%.2f (%.2f..%.2f)", r.Median, r.Min, r.Max)
}
