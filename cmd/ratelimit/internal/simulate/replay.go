package simulate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// checkEvery is the number of lines between checks of the context.
const checkEvery = 256

// replay is one replay.
type replay struct {
	config     *Config
	asks       *asks
	parser     *parser
	simulation *ratelimit.Simulation
	counts     counts
	report     Report
	refused    []ratelimit.Refusal
}

func newReplay(config *Config) (*replay, error) {
	asks, set, err := newAsks(config)
	if err != nil {
		return nil, err
	}
	r := &replay{
		config: config, asks: asks, parser: newParser(config.Format, config.Fields, asks.wanted),
		counts: make(counts),
	}
	r.simulation, err = ratelimit.NewSimulation(ratelimit.Config{
		Policies: set, HashKey: config.HashKey,
		Refused: func(_ context.Context, refusal ratelimit.Refusal) { r.refused = append(r.refused, refusal) },
	})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidConfig, err)
	}
	return r, nil
}

// replay replays a source.
func (r *replay) replay(ctx context.Context, source *Source) (err error) {
	lines, err := source.open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lines.close()) }()
	for {
		if lines.number%checkEvery == 0 {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("simulate: %w", err)
			}
		}
		line, err := lines.next()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case errors.Is(err, errTooLong):
			r.report.Lines++
			r.report.Unparsed.add(source.Name, lines.number, err)
			continue
		case err != nil:
			return fmt.Errorf("simulate: %s: %w", source.Name, err)
		case len(line) == 0:
			continue
		}
		r.report.Lines++
		if err := r.decide(ctx, source.Name, lines.number, string(line)); err != nil {
			return err
		}
	}
}

// decide decides on a line.
func (r *replay) decide(ctx context.Context, source string, number int64, line string) error {
	record, err := r.parser.parse(line)
	if err != nil {
		r.report.Unparsed.add(source, number, err)
		return nil
	}
	r.arrived(record.at)
	requests, err := r.asks.of(record)
	if errors.Is(err, rules.ErrNoTier) {
		r.report.Unlimited++
		return nil
	}
	var d ratelimit.Decision
	if err == nil {
		r.refused = r.refused[:0]
		d, err = r.simulation.Take(ctx, record.at, requests...)
	}
	if err != nil {
		r.report.Failed.add(source, number, err)
		return nil
	}
	r.report.Decided++
	if d.Allowed {
		r.report.Admitted++
	} else {
		r.report.Refused++
	}
	for i := range d.States {
		r.counts.decided(record.at, &d.States[i])
	}
	for i := range r.refused {
		r.counts.refused(record.at, &r.refused[i])
		if err := r.tellRefused(source, number, record.at, &r.refused[i], &d); err != nil {
			return err
		}
	}
	return nil
}

// arrived counts the instant of a line.
func (r *replay) arrived(at time.Time) {
	p := &r.report
	if back := p.To.Sub(at); !p.To.IsZero() && back > 0 {
		p.OutOfOrder++
		p.StepBackUs = max(p.StepBackUs, back.Microseconds())
	}
	p.From, p.To = widened(p.From, p.To, at)
}

// tellRefused passes a refusal to Config.Refused.
func (r *replay) tellRefused(source string, number int64, at time.Time, refusal *ratelimit.Refusal, d *ratelimit.Decision) error {
	if r.config.Refused == nil {
		return nil
	}
	told := Refusal{
		Time: at, Limit: refusal.Limit, Key: refusal.Key, Rule: refusal.Rule, Cost: refusal.Cost, Shadow: refusal.Shadow,
		Source: source, Line: number,
	}
	for i := range d.States { // tiers name a limit once
		if s := &d.States[i]; s.Limit.Name() == refusal.Limit {
			told.RetryAfterUs = s.RetryAfter.Microseconds()
		}
	}
	if err := r.config.Refused(told); err != nil {
		return fmt.Errorf("simulate: tell a refusal: %w", err)
	}
	return nil
}

// end returns the report.
func (r *replay) end() *Report {
	p := &r.report
	p.Format, p.Buckets = r.parser.format, r.simulation.Buckets()
	p.Limits, p.Keys = r.counts.reports(), r.counts.top(r.config.Top)
	for _, problems := range []*Problems{&p.Unparsed, &p.Failed} {
		if problems.First == nil {
			problems.First = []Problem{}
		}
	}
	return p
}
