package ahead

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/batch"
	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// limit is a policy of some name, as the limiter knows it.
type limit struct {
	name   string
	policy any // tokens or windows
	terms  bucket.Terms
}

// tokens is a token bucket: Rate tokens arrive each Period.
type tokens struct {
	Rate     float64
	Period   time.Duration
	Capacity float64
	Prefetch time.Duration
}

// windows is a fixed window.
type windows struct {
	Rate     float64
	Period   time.Duration
	Capacity float64
	Start    time.Time
	Prefetch time.Duration
}

func define(name string, policy any) *limit {
	l := &limit{name: name, policy: policy}
	switch p := policy.(type) {
	case tokens:
		l.terms = bucket.Terms{Kind: bucket.Steps{}, Rate: p.Rate, Steps: float64(p.Period.Microseconds()), Step: 1, Phase: bucket.MinInstant, Prefetch: p.Prefetch.Microseconds()}
		l.terms.Capacity, _ = bucket.RowCapacity(p.Capacity, p.Rate, l.terms.Steps, l.terms.Prefetch)
	case windows:
		l.terms = bucket.Terms{
			Kind: bucket.Steps{}, Capacity: max(p.Capacity, p.Rate), Rate: p.Rate, Steps: 1, Step: p.Period.Microseconds(), Prefetch: p.Prefetch.Microseconds(),
		}
		l.terms.Phase = bucket.PhaseOf(p.Start.UnixMicro(), l.terms.Step)
	}
	return l
}

// ask returns an ask for tokens of a key.
func (l *limit) ask(key string, cost float64) bucket.Ask {
	return bucket.Ask{Key: bucket.Key{Name: l.name, Key: key}, Terms: l.terms, Policy: l, Cost: cost}
}

// process answers calls as a limiter does: with kept tokens, or else from the row.
type process struct {
	*Keeper
	row Owner
}

func newProcess(row Owner, options Options) *process {
	return &process{Keeper: New(row, options), row: row}
}

// decision is the answer to a call.
type decision struct {
	bucket.Told
	Prefetched bool
}

func (p *process) take(ctx context.Context, a bucket.Ask) (decision, error) {
	content, asks := &bucket.Content{}, []bucket.Ask{a}
	if views, taken := p.Take(asks, nil); taken {
		return decision{views[0].Tell(content), true}, nil
	}
	if !p.Serves(asks) {
		return p.ask(ctx, a)
	}
	var d decision
	v, given, err := p.Do(ctx, asks, func() (answers []bucket.Answer, err error) {
		if d, err = p.ask(ctx, a); err != nil {
			return nil, err
		}
		return []bucket.Answer{{Allowed: d.Allowed, State: d.State, Now: d.Now}}, nil
	})
	if given {
		return decision{v.Tell(content), true}, nil
	}
	return d, err
}

// ask takes from the row.
func (p *process) ask(ctx context.Context, a bucket.Ask) (decision, error) {
	ctx, cancel := batch.Bounded(ctx, p.options.Timeout)
	defer cancel()
	c := &store.Call{Question: store.Question{Asks: []bucket.Ask{a}}}
	if err := p.row.Fetch(ctx, c); err != nil {
		return decision{}, err
	}
	r := c.Answers[0]
	o := a.Tell(&r, 0, &bucket.Content{})
	return decision{Told: bucket.Told{
		Content: &bucket.Content{Terms: a.Terms, State: r.State}, Now: r.Now, Allowed: r.Allowed, Tokens: o.Tokens, RetryAfter: o.RetryAfter, FullAfter: o.FullAfter,
	}}, nil
}

// end ends the process as Close of a limiter does.
func (p *process) end(t *testing.T) {
	t.Helper()
	p.Shut()
	require.NoError(t, p.Close(t.Context()))
}
