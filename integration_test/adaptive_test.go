package integration_test

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// adaptive returns a limit of a hundred a second that adapts to an upstream, and charges the price.
func adaptive(name string) ratelimit.Limit {
	return ratelimit.Define(name, ratelimit.Adaptive{Contract: ratelimit.PerSecond(100), Apply: true})
}

// market is a database with adaptive limits on a clock that the test sets.
type market struct {
	*bundle
	*clock
	*pricesTold
}

func newMarket(t *testing.T, configure ...func(*pgxpool.Config)) *market {
	t.Helper()
	m := &market{bundle: setup(t, configure...), clock: &clock{}, pricesTold: &pricesTold{}}
	m.set(clockNoon)
	m.limiter = m.process(t, m.pricesTold)
	return m
}

// process returns another Limiter, as another process has one.
func (m *market) process(t *testing.T, told *pricesTold) *ratelimit.Limiter {
	t.Helper()
	return m.with(t, ratelimit.Config{AsOf: m.now, Observer: told})
}

// synchronous returns a process on a single connection, which exchanges prices in its calls and never beside them: none is under
// way when a test moves the clock.
func (m *market) synchronous(t *testing.T, told *pricesTold) *ratelimit.Limiter {
	t.Helper()
	conn, err := pgx.ConnectConfig(t.Context(), m.pool.Config().ConnConfig)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	limiter, err := ratelimit.New(conn, ratelimit.Config{AsOf: m.now, Observer: told, Timeout: patient})
	require.NoError(t, err)
	return limiter
}

func (m *market) pass(d time.Duration) { m.set(m.now().Add(d)) }

// share sets the share of the contract that all processes go by.
func (m *market) share(t *testing.T, name, key string, share float64) {
	t.Helper()
	m.exec(t, `INSERT INTO ratelimit.prices VALUES ($1, $2, 0, $3, $3, 0, 0, 0, $4, false, 0)
		ON CONFLICT (name, key) DO UPDATE SET share = $4`, name, key, m.now().UnixMicro(), share)
}

// learn waits until a limiter knows the price of a request. It asks beside the calls.
func learn(t *testing.T, limiter *ratelimit.Limiter, request ratelimit.Request, price float64) {
	t.Helper()
	eventually(t, fmt.Sprintf("the price is %v", price), func() bool {
		d, err := limiter.Check(t.Context(), request)
		require.NoError(t, err)
		return math.Abs(d.States[0].Price-price) < 1e-9
	})
}

// known is what the table has of a limit and a key.
type known struct {
	Epoch               int64
	BegunUs             int64
	Outcomes            int64
	Accepted, Throttled float64
	Share               float64
	Cut                 bool
}

func (m *market) known(t *testing.T, name, key string) known {
	t.Helper()
	rows, err := m.pool.Query(t.Context(), `
		SELECT epoch, begun_us, outcomes, accepted, throttled, share, cut FROM ratelimit.prices WHERE name = $1 AND key = $2`, name, key)
	require.NoError(t, err)
	found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[known])
	require.NoError(t, err)
	if len(found) == 0 {
		return known{Share: 1}
	}
	return found[0]
}

// report reports so many outcomes, of which some were throttled.
func report(t *testing.T, limiter *ratelimit.Limiter, request ratelimit.Request, accepted, throttled int) {
	t.Helper()
	for i := range accepted + throttled {
		require.NoError(t, limiter.Report(t.Context(), request, ratelimit.Outcome{Throttled: i >= accepted}))
	}
}

// told waits until the reports of the current epoch are in the table. The next call writes them.
func (m *market) told(t *testing.T, limiter *ratelimit.Limiter, request ratelimit.Request, outcomes int64) {
	t.Helper()
	m.pass(time.Second)
	eventually(t, "what was reported is written", func() bool {
		_, err := limiter.Check(t.Context(), request)
		require.NoError(t, err)
		return m.known(t, request.Limit().Name(), "account").Outcomes == outcomes
	})
}

// pricesTold is an Observer that collects prices and failures.
type pricesTold struct {
	mu      sync.Mutex
	changes []ratelimit.PriceChanged
	failed  []error
}

func (p *pricesTold) Observe(_ context.Context, event ratelimit.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch e := event.(type) {
	case ratelimit.PriceChanged:
		p.changes = append(p.changes, e)
	case ratelimit.Failed:
		p.failed = append(p.failed, e.Err)
	}
}

func (p *pricesTold) all() []ratelimit.PriceChanged {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.changes)
}

func (p *pricesTold) failures() []error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.failed)
}

// Eight processes report all the time. Each epoch is ended by one of them, and all learn what came of it.
func TestAdaptiveHasOneWinnerPerEpoch(t *testing.T) {
	t.Parallel()
	const processes = 8
	epochs := testsize.Of[int64](3, 8)
	m := newMarket(t, func(c *pgxpool.Config) { c.MaxConns = 2 * processes })
	upstream := ratelimit.Define("upstream", ratelimit.Adaptive{Contract: ratelimit.PerSecond(100), Growth: 0.01, Apply: true})
	m.share(t, "upstream", "account", 0.1) // so that it grows with each epoch
	request := upstream.For("account")
	observers, limiters := make([]*pricesTold, processes), make([]*ratelimit.Limiter, processes)
	for i := range processes {
		observers[i] = &pricesTold{}
		limiters[i] = m.process(t, observers[i])
	}
	decisions := func() (n int64) {
		for _, o := range observers {
			for _, change := range o.all() {
				if change.Decided {
					n++
				}
			}
		}
		return n
	}
	for decisions() < epochs { // on a busy machine some epochs end without outcomes, and change no price
		m.pass(500 * time.Millisecond)
		require.NoError(t, atonce.Do(processes, func(i int) error {
			for range 50 {
				if err := limiters[i].Report(t.Context(), request, ratelimit.Outcome{}); err != nil {
					return err
				}
			}
			return nil
		}))
	}
	for _, limiter := range limiters { // which waits for calls in progress
		require.NoError(t, limiter.Close(t.Context()))
	}
	after := m.known(t, "upstream", "account")
	var decided []ratelimit.PriceChanged
	for _, o := range observers {
		for _, err := range o.failures() { // on a busy machine an exchange can give up behind others; the next one writes its counts
			require.Equal(t, "55P03", sqlstate(err))
		}
		for _, change := range o.all() {
			if change.Decided {
				decided = append(decided, change)
			}
		}
	}
	slices.SortFunc(decided, func(a, b ratelimit.PriceChanged) int { return cmp.Compare(b.Before, a.Before) })
	price := 10.0
	for _, change := range decided { // each goes on where the one before ended: no epoch was ended twice
		require.Equal(t, price, change.Before)
		price = change.Price
	}
	require.Equal(t, 1/after.Share, price)
	require.NotEmpty(t, decided)
	require.LessOrEqual(t, int64(len(decided)), after.Epoch)
	for range processes {
		fresh := m.process(t, &pricesTold{})
		learn(t, fresh, request, 1/after.Share)
	}
}

// What eight processes report at once is all counted, and once.
func TestAdaptiveCountsEachOutcomeOnce(t *testing.T) {
	t.Parallel()
	const processes, each = 8, 500
	m := newMarket(t, func(c *pgxpool.Config) { c.MaxConns = 2 * processes })
	request := adaptive("upstream").For("account").Cost(2)
	limiters := make([]*ratelimit.Limiter, processes)
	for i := range limiters {
		limiters[i] = m.synchronous(t, &pricesTold{})
	}
	require.NoError(t, atonce.Do(processes, func(i int) error {
		for n := range each {
			if err := limiters[i].Report(t.Context(), request, ratelimit.Outcome{Throttled: n%10 == 9}); err != nil {
				return err
			}
		}
		return nil
	}))
	m.pass(time.Second)
	for _, limiter := range limiters {
		_, err := limiter.Check(t.Context(), request)
		require.NoError(t, err)
	}
	require.Equal(t, known{
		BegunUs: clockNoon.UnixMicro(), Outcomes: processes * each, Accepted: 1.8 * processes * each, Throttled: 0.2 * processes * each, Share: 1,
	}, m.known(t, "upstream", "account"))
}
