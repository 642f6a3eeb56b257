package scenario

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/bench/internal/contender"
	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
)

// Options are how scenarios are run.
type Options struct {
	Rounds int
	Round  time.Duration // how long each contender calls in each round
}

// Servers are what scenarios run on.
type Servers struct {
	Postgres *server.Postgres
	Redis    map[server.Durability]*server.Redis // empty when there is none
	Meter    *server.Meter
}

// open is a contender with its runner, and its row in the result.
type open struct {
	runner contender.Runner
	row    int
}

// Run measures the scenario in a database of its own. An error says that it could not be measured, or that a
// contender gave a wrong answer; how fast anything was is no error.
func (s Scenario) Run(ctx context.Context, on Servers, o Options) (_ Result, err error) {
	database, err := on.Postgres.NewDatabase(ctx)
	if err != nil {
		return Result{}, err
	}
	defer func() { err = errors.Join(err, database.Drop(ctx)) }()
	if err := database.Checkpoint(ctx); err != nil { // before anything is filled, also in the databases of contenders' own
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
	if s.Calls > 0 {
		err = s.sequence(ctx, opened, &result)
	} else {
		err = s.rounds(ctx, opened, o, &result)
	}
	if err != nil {
		return Result{}, err
	}
	for _, c := range opened {
		if err := c.runner.Check(ctx); err != nil {
			return Result{}, fmt.Errorf("%s: %w", s.Contenders[c.row].Name, err)
		}
	}
	for _, f := range s.Facts {
		m := Measurement{Name: f.Name, Unit: f.Unit}
		if err := database.Admin().QueryRow(ctx, f.SQL).Scan(&m.Value); err != nil {
			return Result{}, fmt.Errorf("%s: %w", f.Name, err)
		}
		result.Measured = append(result.Measured, m)
	}
	result.judge()
	return result, nil
}

// open opens the contenders. Close them, also after an error.
func (s Scenario) open(ctx context.Context, database *server.Database, on Servers, result *Result) ([]open, error) {
	var opened []open
	for i, c := range s.Contenders {
		result.Rows = append(result.Rows, Row{Name: c.Name})
		runner, err := c.Way.Open(ctx, contender.Bench{
			Database: database, Redis: on.Redis, Meter: on.Meter, Name: fmt.Sprintf("contender%d", i), Callers: s.Callers, Burst: s.Burst, Disk: s.Disk,
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

// rounds lets the contenders call in turns: first one turn each to warm up, then in each round one turn each,
// beginning with another one every time.
func (s Scenario) rounds(ctx context.Context, opened []open, o Options, result *Result) error {
	for round := -1; round < o.Rounds; round++ {
		for i := range opened {
			c := opened[(i+max(round, 0))%len(opened)]
			measured, err := c.runner.Run(ctx, load.Amount{For: o.Round})
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

const (
	tenths         = 10
	roundsPerTenth = 5
)

// sequence lets the one contender make all its calls, and keeps the rounds of the first tenth and the last.
func (s Scenario) sequence(ctx context.Context, opened []open, result *Result) error {
	if len(opened) == 0 {
		return nil
	}
	var all []contender.Round
	for range tenths * roundsPerTenth {
		measured, err := opened[0].runner.Run(ctx, load.Amount{Calls: s.Calls / (tenths * roundsPerTenth)})
		if err != nil {
			return fmt.Errorf("%s: %w", s.Contenders[0].Name, err)
		}
		all = append(all, measured)
	}
	result.Rows = []Row{
		{Name: lastTenth, Rounds: all[len(all)-roundsPerTenth:]},
		{Name: firstTenth, Rounds: all[:roundsPerTenth]},
	}
	return nil
}
