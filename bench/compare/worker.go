package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/pgratelimit/pgratelimit/bench/internal/contender"
	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/bench/internal/scenario"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
)

// measured is a round as the worker reports it.
type measured struct {
	Throughput, P50, Trips, Allocations float64
}

// work measures a round of the scenario for each line that it reads, and answers with a line.
func work(ctx context.Context, name string, round time.Duration, in io.Reader, out io.Writer) (err error) {
	s, found := find(name)
	if !found {
		return fmt.Errorf("there is no scenario %q", name)
	}
	postgres, err := server.FindPostgres(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, postgres.Close()) }() // which does nothing to one that another process started
	database, err := postgres.NewDatabase(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, database.Drop(ctx)) }()
	runner, err := s.Contenders[0].Way.Open(ctx, contender.Bench{Database: database, Name: "contender0", Callers: s.Callers, Burst: s.Burst})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, runner.Close()) }()
	if err := database.Settle(ctx); err != nil {
		return err
	}
	answers, asked := json.NewEncoder(out), bufio.NewScanner(in)
	if err := answers.Encode(measured{}); err != nil { // it is ready
		return err
	}
	for asked.Scan() {
		r, err := runner.Run(ctx, load.Amount{For: round})
		if err != nil {
			return err
		}
		m := measured{Throughput: r.Throughput, P50: r.P50, Trips: r.Trips, Allocations: r.Allocations}
		if math.IsNaN(m.Trips) {
			m.Trips = 0
		}
		if err := answers.Encode(m); err != nil {
			return err
		}
	}
	return errors.Join(asked.Err(), runner.Check(ctx))
}

// find returns the scenario of that name.
func find(name string) (scenario.Scenario, bool) {
	for _, s := range scenario.All(false) {
		if s.Name == name {
			return s, true
		}
	}
	return scenario.Scenario{}, false
}
