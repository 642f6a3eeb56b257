package scenario

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/bench/internal/contender"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
)

// Options are the settings of a run.
type Options struct {
	Rounds int
	Round  time.Duration // the time of a contender in each round
}

// Servers are the servers of a run.
type Servers struct {
	Postgres *server.Postgres
	Redis    map[server.Durability]*server.Redis // empty without a redis-server
	Meter    *server.Meter
}

// open is a contender with its runner and its row.
type open struct {
	runner *contender.Runner
	row    int
}

// Run measures the scenario in a database of its own. It returns an error if the scenario could not be measured, or if
// a contender gave a wrong answer, but not for a slow contender.
func (s Scenario) Run(ctx context.Context, on Servers, o Options) (_ Result, err error) {
	database, err := on.Postgres.NewDatabase(ctx)
	if err != nil {
		return Result{}, err
	}
	defer func() { err = errors.Join(err, database.Drop(ctx)) }()
	if err := database.Checkpoint(ctx); err != nil { // before rows are filled, also in the contenders' own databases
		return Result{}, err
	}
	result := Result{Scenario: s}
	opened, err := s.open(ctx, database, on, &result)
	defer func() {
		for _, c := range opened {
			err = errors.Join(err, c.runner.Close())
		}
	}()
	if err == nil {
		err = database.Settle(ctx)
	}
	if err != nil {
		return Result{}, err
	}
	if err := s.rounds(ctx, opened, o, &result); err != nil {
		return Result{}, err
	}
	for _, c := range opened {
		if err := c.runner.Check(ctx); err != nil {
			return Result{}, fmt.Errorf("%s: %w", s.Contenders[c.row].Name, err)
		}
	}
	return result, nil
}

// open opens the contenders. Close them, even after an error.
func (s Scenario) open(ctx context.Context, database *server.Database, on Servers, result *Result) ([]open, error) {
	var opened []open
	for i, c := range s.Contenders {
		result.Rows = append(result.Rows, Row{Name: c.Name})
		runner, err := c.Way.Open(ctx, contender.Bench{
			Database: database, Redis: on.Redis, Meter: on.Meter, Name: fmt.Sprintf("contender%d", i), Callers: s.Callers,
			Disk: s.Disk,
		})
		if errors.Is(err, contender.ErrUnavailable) {
			result.Rows[i].Missing = err.Error()
			continue
		}
		if err != nil {
			return opened, fmt.Errorf("open %s: %w", c.Name, err)
		}
		opened = append(opened, open{runner, i})
	}
	return opened, nil
}

// rounds makes the contenders take turns: one turn each to warm up, then one turn each in every round,
// each round beginning with the next contender.
func (s Scenario) rounds(ctx context.Context, opened []open, o Options, result *Result) error {
	for round := -1; round < o.Rounds; round++ {
		for i := range opened {
			c := opened[(i+max(round, 0))%len(opened)]
			measured, err := c.runner.Run(ctx, o.Round)
			if err != nil {
				return fmt.Errorf("%s: %w", s.Contenders[c.row].Name, err)
			}
			if round >= 0 {
				result.Rows[c.row].Rounds = append(result.Rows[c.row].Rounds, measured)
			}
		}
	}
	return nil
}
