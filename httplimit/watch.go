package httplimit

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
)

// watch asks the rules in shadow mode of a request that is let through, each by itself, so that none of them
// stands in another's way, and all at once, so that the request waits for one round trip. It returns what they took.
func (m *middleware) watch(ctx context.Context, asks []ask) []*charge {
	taken := make([][]*charge, len(asks))
	var group sync.WaitGroup
	for i := 1; i < len(asks); i++ {
		group.Go(func() { taken[i] = m.watchOne(ctx, asks[i:i+1]) })
	}
	if len(asks) > 0 {
		taken[0] = m.watchOne(ctx, asks[:1])
	}
	group.Wait()
	return slices.Concat(taken...)
}

// watchOne asks one rule in shadow mode.
func (m *middleware) watchOne(ctx context.Context, asks []ask) []*charge {
	began := time.Now()
	d, err := m.take(ctx, asks, true)
	outcome := Outcome{Result: Allowed, Shadow: true, Limits: names(asks), Decision: d, Err: err, Elapsed: time.Since(began)}
	_, tried := telemetry.Refusing(d)
	switch {
	case err != nil:
		outcome.Result = m.failure(ctx, err)
	case !d.Allowed || len(tried) > 0: // its rule may be in shadow mode, too
		outcome.Result = Refused
	}
	m.tell(ctx, outcome)
	return charged(asks, d)
}
