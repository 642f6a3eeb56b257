package httplimit

import (
	"context"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
)

// watch asks the rules in shadow mode of a request that is let through, each by itself, so that none of them
// stands in another's way, and all at once, so that the request waits for one round trip. It notes what they took.
// It passes a panic of an observer on to the request's goroutine, where net/http recovers it.
func (m *middleware) watch(ctx context.Context, admission *Admission, asks []ask) {
	var group sync.WaitGroup
	panicked := make([]any, len(asks))
	for i := 1; i < len(asks); i++ {
		group.Go(func() {
			defer func() { panicked[i] = recover() }()
			m.watchOne(ctx, admission, asks[i:i+1])
		})
	}
	if len(asks) > 0 {
		m.watchOne(ctx, admission, asks[:1])
	}
	group.Wait()
	for _, p := range panicked {
		if p != nil {
			panic(p)
		}
	}
}

// watchOne asks one rule in shadow mode.
func (m *middleware) watchOne(ctx context.Context, admission *Admission, asks []ask) {
	began := time.Now()
	lease, err := m.take(ctx, asks, true)
	d := lease.Decision
	outcome := Outcome{Result: Allowed, Shadow: true, Limits: names(asks), Decision: d, Err: err, Elapsed: time.Since(began)}
	_, tried := telemetry.Refusing(d)
	switch {
	case err != nil:
		outcome.Result = m.failure(ctx, err)
	case !d.Allowed || len(tried) > 0: // its rule may be in shadow mode, too
		outcome.Result = Refused
	}
	m.tell(ctx, outcome)
	admission.mu.Lock()
	defer admission.mu.Unlock()
	admission.charges = append(admission.charges, charged(asks, d)...)
	admission.hold(lease, true)
}
