package against

import (
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"

	"github.com/pgratelimit/pgratelimit/bench/internal/contender"
	"github.com/pgratelimit/pgratelimit/bench/internal/load"
)

// Process is the first contender of a scenario, measured by a program that calls Work.
type Process struct {
	Program   string
	Arguments []string // which have the program call Work
	Postgres  string   // the server's connection string
}

// Open starts the process, and returns when it is ready.
func (p Process) Open(ctx context.Context, _ contender.Bench) (_ contender.Runner, err error) {
	c := exec.CommandContext(ctx, p.Program, p.Arguments...)
	c.Env = append(os.Environ(), "RATELIMIT_DATABASE_URL="+p.Postgres)
	c.Stderr = os.Stderr
	input, err := c.StdinPipe()
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
	s := &side{ask: gob.NewEncoder(input), answers: gob.NewDecoder(answers), close: func() error {
		return errors.Join(input.Close(), c.Wait())
	}}
	if _, err := s.answer(); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// question is what a process is asked: to make a round of calls, or to check those it made.
type question struct {
	Amount load.Amount
	Check  bool
}

// answer is what it answers. The first one answers nothing: the process is ready.
type answer struct {
	Round  contender.Round
	Failed string // why it could not do it
}

// side is a process that measures, as a Runner.
type side struct {
	ask     *gob.Encoder
	answers *gob.Decoder
	close   func() error
}

func (s *side) Run(_ context.Context, amount load.Amount) (contender.Round, error) {
	return s.exchange(question{Amount: amount})
}

func (s *side) Check(context.Context) error {
	_, err := s.exchange(question{Check: true})
	return err
}

func (s *side) Close() error { return s.close() }

func (s *side) exchange(q question) (contender.Round, error) {
	if err := s.ask.Encode(q); err != nil {
		return contender.Round{}, fmt.Errorf("ask the process: %w", err)
	}
	return s.answer()
}

func (s *side) answer() (contender.Round, error) {
	var a answer
	if err := s.answers.Decode(&a); err != nil {
		if errors.Is(err, io.EOF) {
			return contender.Round{}, errors.New("the process has ended")
		}
		return contender.Round{}, fmt.Errorf("read the process's answer: %w", err)
	}
	if a.Failed != "" {
		return contender.Round{}, errors.New(a.Failed)
	}
	return a.Round, nil
}
