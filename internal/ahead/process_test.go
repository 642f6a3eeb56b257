package ahead

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/batch"
	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// limit is a policy of some name, as the limiter knows it.
type limit struct {
	name           string
	rate, capacity float64 // of the policy: the row may hold less
	terms          bucket.Terms
}

// tokenBucket returns a limit of rate tokens each period.
func tokenBucket(name string, rate float64, period time.Duration, capacity float64, prefetch time.Duration) *limit {
	l := &limit{name, rate, capacity, buckettest.TokenBucket(rate, period, capacity)}
	l.terms.Prefetch = prefetch.Microseconds()
	l.terms.Capacity, _ = bucket.RowCapacity(capacity, rate, l.terms.Steps, l.terms.Prefetch)
	return l
}

// fixedWindow returns a limit of rate tokens in each window.
func fixedWindow(name string, rate float64, period time.Duration, capacity float64, start time.Time, prefetch time.Duration) *limit {
	l := &limit{name, rate, capacity, buckettest.FixedWindow(rate, period, capacity, start.UnixMicro())}
	l.terms.Prefetch = prefetch.Microseconds()
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
