package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/pgratelimit/pgratelimit/bench/internal/report"
	"github.com/pgratelimit/pgratelimit/bench/internal/scenario"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
)

// run measures the scenarios, and writes each table to w when it is ready.
func run(ctx context.Context, w io.Writer, o options) (err error) {
	scenarios := chosen(o)
	if len(scenarios) == 0 {
		return fmt.Errorf("no scenario matches %q", o.only)
	}
	on, closeServers, err := start(ctx)
	defer func() { err = errors.Join(err, closeServers()) }()
	if err != nil {
		return err
	}
	machine, err := server.Describe(on.Postgres.Directory)
	if err != nil {
		return err
	}
	redis := ""
	if plain := on.Redis[server.Nothing]; plain != nil {
		redis = fmt.Sprintf("%s with its defaults and %q", plain.Version, server.Durabilities())
	}
	report.Header(w, machine, on.Postgres.Version, redis)
	fmt.Fprintf(w, "%d rounds of %v for each contender, in turns; figures are medians of the rounds, with the middle "+
		"half of them in brackets\n", o.rounds, o.round)
	if o.quick {
		fmt.Fprintln(w, "quick: the rounds are too short for figures to quote")
	}
	return measure(ctx, w, scenarios, on, o)
}

// start starts the servers. closeAll ends the servers that run; call it also after an error.
func start(ctx context.Context) (on scenario.Servers, closeAll func() error, err error) {
	var closes []func() error
	closeAll = func() error {
		var errs []error
		for _, closeOne := range slices.Backward(closes) {
			errs = append(errs, closeOne())
		}
		return errors.Join(errs...)
	}
	if on.Postgres, err = server.StartPostgres(ctx); err != nil {
		return on, closeAll, err
	}
	closes = append(closes, on.Postgres.Close)
	on.Redis = map[server.Durability]*server.Redis{}
	processes := []int{os.Getpid()}
	for _, durability := range server.Durabilities() {
		redis, err := server.StartRedis(ctx, durability)
		if errors.Is(err, server.ErrNoRedis) {
			break
		}
		if err != nil {
			return on, closeAll, err
		}
		closes = append(closes, redis.Close)
		on.Redis[durability] = redis
		processes = append(processes, redis.Process)
	}
	on.Meter = server.NewMeter(on.Postgres, processes...)
	return on, closeAll, nil
}

// chosen returns the requested scenarios.
func chosen(o options) []scenario.Scenario {
	var chosen []scenario.Scenario
	for _, s := range scenario.All(o.quick) {
		if o.only.MatchString(s.Name) && (o.named || !strings.HasPrefix(s.Name, "curve-")) {
			chosen = append(chosen, s)
		}
	}
	return chosen
}

// measure runs the scenarios one after the other until ctx ends. It continues after a failed scenario.
func measure(
	ctx context.Context, w io.Writer, scenarios []scenario.Scenario, on scenario.Servers, o options,
) (failed error) {
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
	}
	return failed
}
