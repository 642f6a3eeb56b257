package simulate

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// checkEvery is the number of lines between checks of the context.
const checkEvery = 256

// replay is one replay.
type replay struct {
	config     *Config
	asks       *asks
	merge      *merge
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
	r := &replay{config: config, asks: asks, counts: make(counts)}
	r.merge = &merge{window: config.Window, report: &r.report}
	r.simulation, err = ratelimit.NewSimulation(ratelimit.Config{
		Policies: set, HashKey: config.HashKey,
		Refused: func(_ context.Context, refusal ratelimit.Refusal) { r.refused = append(r.refused, refusal) },
	})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidConfig, err)
	}
	return r, nil
}

// replay replays the sources.
func (r *replay) replay(ctx context.Context, sources []Source) (err error) {
	defer func() { err = errors.Join(err, r.merge.close()) }()
	for i := range sources {
		if err := r.merge.add(&sources[i], newParser(r.config.Fields, r.asks.wanted)); err != nil {
			return err
		}
	}
	if err := r.merge.checkTwice(sources); err != nil {
		return err
	}
	if err := r.merge.begin(ctx); err != nil {
		return err
	}
	for {
		line, err := r.merge.next(ctx)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case r.report.Lines%checkEvery == 0 && ctx.Err() != nil:
			return fmt.Errorf("simulate: %w", ctx.Err())
		}
		if err := r.decide(ctx, line); err != nil {
			return err
		}
	}
}

// decide decides on a line.
func (r *replay) decide(ctx context.Context, line *held) error {
	record := &line.record
	r.report.Lines++
	r.report.From, r.report.To = widened(r.report.From, r.report.To, record.at)
	requests, err := r.asks.of(record)
	if errors.Is(err, rules.ErrNoTier) {
		r.report.Unlimited++
		return nil
	}
	var d ratelimit.Decision
	if err == nil {
		r.refused = r.refused[:0]
		d, err = r.simulation.At(record.at).Take(context.WithoutCancel(ctx), requests...)
	}
	if err != nil {
		r.report.Failed.add(line.source.name, line.number, err)
		return nil
	}
	r.report.Decided++
	r.countPlan(record)
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
		if err := r.tellRefused(line, &r.refused[i], &d); err != nil {
			return err
		}
	}
	return nil
}

// countPlan counts a line whose plan has no rule of its own, if there are rules for plans.
func (r *replay) countPlan(record *record) {
	plan := r.asks.plan(record)
	switch _, ruled := r.asks.plans[plan]; {
	case len(r.asks.plans) == 0 || ruled:
	case plan == "":
		r.report.WithoutPlan++
	default:
		r.report.UnknownPlan++
	}
}

// tellRefused passes a refusal to Config.Refused.
func (r *replay) tellRefused(line *held, refusal *ratelimit.Refusal, d *ratelimit.Decision) error {
	if r.config.Refused == nil {
		return nil
	}
	told := Refusal{
		Time: line.record.at, Limit: refusal.Limit, Key: refusal.Key, Rule: refusal.Rule, Cost: refusal.Cost,
		Shadow: refusal.Shadow,
		Source: line.source.name, Line: line.number,
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
	p.Buckets = r.simulation.Buckets()
	p.Limits, p.Keys = r.counts.reports(), r.counts.top(r.config.Top)
	for _, problems := range []*Problems{&p.Unparsed, &p.Failed} {
		if problems.First == nil {
			problems.First = []Problem{}
		}
	}
	return p
}
