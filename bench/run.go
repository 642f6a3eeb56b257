package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/pgratelimit/pgratelimit/bench/internal/plot"
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
	described := report.Run{
		Postgres: on.Postgres.Version, Settings: on.Postgres.Settings(), Rounds: o.rounds, Round: o.round, Quick: o.quick,
		Redis: server.ErrNoRedis.Error(),
	}
	if redis := on.Redis[server.Nothing]; redis != nil {
		described.Redis = fmt.Sprintf("%s with its defaults and %q", redis.Version, server.Durabilities())
	}
	if described.Machine, err = server.Describe(ctx, on.Postgres.Directory); err != nil {
		return err
	}
	report.Header(w, described)
	described.Results, err = measure(ctx, w, scenarios, on, o)
	return errors.Join(err, keep(report.Of(described), o))
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
		if o.only.MatchString(s.Name) && (s.Curve == "" || o.named) {
			chosen = append(chosen, s.With(o.contenders.MatchString))
		}
	}
	return chosen
}

// measure runs the scenarios one after the other until ctx ends. It continues after a failed scenario.
func measure(ctx context.Context, w io.Writer, scenarios []scenario.Scenario, on scenario.Servers,
	o options,
) ([]scenario.Result, error) {
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

// draw draws the curves of a file.
func draw(o options) error {
	file, err := os.Open(o.draw)
	if err != nil {
		return err
	}
	document, err := report.ReadJSON(file)
	if err := errors.Join(err, file.Close()); err != nil {
		return err
	}
	return keep(document, o)
}

// keep writes the drawings and the figures to files.
func keep(d report.Document, o options) (err error) {
	if o.svg != "" {
		for _, curve := range d.Curves {
			for suffix, figure := range map[string]plot.Figure{"": plot.Throughput(), "-cpu": plot.Processor()} {
				name := "curve-" + strings.ReplaceAll(curve.Name, " ", "-") + suffix + ".svg"
				if err := os.WriteFile(filepath.Join(o.svg, name), plot.SVG(curve, figure), 0o644); err != nil {
					return err
				}
			}
		}
	}
	if o.json == "" {
		return nil
	}
	file, err := os.Create(o.json)
	if err != nil {
		return err
	}
	return errors.Join(d.JSON(file), file.Close())
}
