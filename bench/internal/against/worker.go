package against

import (
	"context"
	"encoding/gob"
	"errors"
	"io"
	"os"

	"github.com/pgratelimit/pgratelimit/bench/internal/contender"
	"github.com/pgratelimit/pgratelimit/bench/internal/scenario"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
)

// Work measures the first contender of the scenario as it is asked to on in, and answers on out, until in ends. It has a
// database of its own on the server that RATELIMIT_DATABASE_URL names.
func Work(ctx context.Context, s scenario.Scenario, in io.Reader, out io.Writer) (err error) {
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
	meter := server.NewMeter(postgres, os.Getpid())
	runner, err := s.Contenders[0].Way.Open(ctx, contender.Bench{Database: database, Meter: meter, Name: "contender0", Callers: s.Callers, Burst: s.Burst})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, runner.Close()) }()
	if err := database.Settle(ctx); err != nil {
		return err
	}
	questions, answers := gob.NewDecoder(in), gob.NewEncoder(out)
	if err := answers.Encode(answer{}); err != nil { // it is ready
		return err
	}
	for {
		var q question
		if err := questions.Decode(&q); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if err := answers.Encode(do(ctx, runner, q)); err != nil {
			return err
		}
	}
}

// do does what is asked.
func do(ctx context.Context, runner contender.Runner, q question) (a answer) {
	var err error
	if q.Check {
		err = runner.Check(ctx)
	} else {
		a.Round, err = runner.Run(ctx, q.Amount)
	}
	if err != nil {
		a.Failed = err.Error()
	}
	return a
}
