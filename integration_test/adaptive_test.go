package integration_test

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
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
	m.limiter = m.with(t, ratelimit.Config{AsOf: m.now, Observer: m.pricesTold})
	return m
}

// synchronous returns a process on a single connection, which exchanges prices in its calls and never beside them: none is under
// way when a test moves the clock.
func (m *market) synchronous(t *testing.T) (*ratelimit.Limiter, *pgx.Conn) {
	t.Helper()
	conn, err := pgx.ConnectConfig(t.Context(), m.pool.Config().ConnConfig)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	limiter, err := ratelimit.New(conn, ratelimit.Config{AsOf: m.now, Timeout: patient})
	require.NoError(t, err)
	return limiter, conn
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
		require.NoError(t, errOf(limiter.Check(t.Context(), request)))
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
	epochs := testsize.Of(3, 8)
	m := newMarket(t, func(c *pgxpool.Config) { c.MaxConns = 2 * processes })
	upstream := ratelimit.Define("upstream", ratelimit.Adaptive{Contract: ratelimit.PerSecond(100), Growth: 0.01, Apply: true})
	m.share(t, "upstream", "account", 0.1) // so that it grows with each epoch
	request := upstream.For("account")
	limiters := make([]*ratelimit.Limiter, processes)
	for i := range limiters {
		limiters[i] = m.with(t, ratelimit.Config{AsOf: m.now, Observer: m.pricesTold})
	}
	decided := func() []ratelimit.PriceChanged {
		return slices.DeleteFunc(m.all(), func(change ratelimit.PriceChanged) bool { return !change.Decided })
	}
	for len(decided()) < epochs { // on a busy machine some epochs end without outcomes, and change no price
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
	for _, err := range m.failures() { // on a busy machine an exchange can give up behind others; the next one writes its counts
		require.Equal(t, "55P03", sqlstate(err))
	}
	changes, price := decided(), 10.0
	slices.SortFunc(changes, func(a, b ratelimit.PriceChanged) int { return cmp.Compare(b.Before, a.Before) })
	for _, change := range changes { // each goes on where the one before ended: no epoch was ended twice
		require.Equal(t, price, change.Before)
		price = change.Price
	}
	require.Equal(t, 1/after.Share, price)
	require.LessOrEqual(t, int64(len(changes)), after.Epoch)
	learn(t, m.with(t, ratelimit.Config{AsOf: m.now}), request, 1/after.Share)
}

// holds checks what a bucket holds.
func (m *market) holds(t *testing.T, request ratelimit.Request, tokens float64) {
	t.Helper()
	v, err := m.limiter.Value(t.Context(), request)
	require.NoError(t, err)
	require.InDelta(t, tokens, v.Tokens, 1e-4) // what arrives in a few minutes
}

// An upstream that wants to be left alone is, by all processes, until then.
func TestAdaptivePause(t *testing.T) {
	t.Parallel()
	m := newMarket(t)
	request := adaptive("upstream").For("account")
	m.limiter, _ = m.synchronous(t)
	other, _ := m.synchronous(t)
	learn(t, other, request, 1)
	r, err := m.limiter.Reserve(t.Context(), request)
	require.NoError(t, err)
	require.NoError(t, m.limiter.Report(t.Context(), request, ratelimit.Outcome{Throttled: true, RetryAfter: 30 * time.Second}))
	until := m.now().Add(30 * time.Second)
	requirePaused := func(limiter *ratelimit.Limiter) {
		d, err := limiter.Take(t.Context(), request)
		require.NoError(t, err)
		require.False(t, d.Allowed)
		require.Equal(t, until.Sub(m.now()), d.RetryAfter)
		require.True(t, d.States[0].PausedUntil.Equal(until))
	}
	requirePaused(m.limiter) // at once
	m.told(t, m.limiter, request, 1)
	m.pass(2 * time.Second)
	requirePaused(other) // which learns of the pause in that call
	slot, err := other.Start(t.Context(), r.ID)
	require.NoError(t, err)
	require.Equal(t, until.Sub(m.now()), slot.Wait)
	requireAllowed(t, taking(adaptive("upstream").For("another account")), other)
	m.set(until.Add(-time.Microsecond))
	requirePaused(m.limiter)
	requirePaused(other)
	m.set(until)
	requireAllowed(t, taking(request), m.limiter)
	requireAllowed(t, taking(request), other)
}

// A Limiter on a single connection learns the price in its calls, and leaves transactions on it alone.
func TestAdaptiveOnASingleConnection(t *testing.T) {
	t.Parallel()
	m := newMarket(t)
	limiter, conn := m.synchronous(t)
	request := adaptive("upstream").For("account")
	m.share(t, "upstream", "account", 0.25)
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	d, err := limiter.WithTx(tx).Take(t.Context(), request)
	require.NoError(t, err)
	require.Equal(t, 1.0, d.States[0].Price, "it cannot have asked")
	require.NoError(t, limiter.WithTx(tx).Report(t.Context(), request, ratelimit.Outcome{}))
	require.NoError(t, tx.Commit(t.Context()))
	d, err = limiter.Take(t.Context(), request)
	require.NoError(t, err)
	require.Equal(t, 4.0, d.States[0].Price)
	require.EqualValues(t, 1, m.known(t, "upstream", "account").Outcomes)
}

// With a bound on owed tokens, a price does not reduce the amount that can be reserved.
func TestAdaptiveReserveBeyondTheMost(t *testing.T) {
	t.Parallel()
	m := newMarket(t)
	upstream := ratelimit.Define("upstream", ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 10, Period: time.Second, MaxReserved: 5}, Apply: true})
	request := upstream.For("account").Cost(12)
	m.share(t, "upstream", "account", 0.25)
	learn(t, m.limiter, request.Cost(1), 4)
	r, err := m.limiter.Reserve(t.Context(), request)
	require.NoError(t, err)
	require.True(t, r.Allowed)
	m.holds(t, request, -38)
	require.Equal(t, 3800*time.Millisecond, r.Delay())
	again, err := m.limiter.Reserve(t.Context(), request)
	require.NoError(t, err)
	require.False(t, again.Allowed)
	m.pass(again.RetryAfter)
	again, err = m.limiter.Reserve(t.Context(), request)
	require.NoError(t, err)
	require.True(t, again.Allowed)
	require.NoError(t, m.limiter.Cancel(t.Context(), again.ID))
	require.NoError(t, errOf(m.limiter.Renew(t.Context(), again.ID)))
	require.ErrorIs(t, errOf(m.limiter.Reserve(t.Context(), request.Cost(16))), ratelimit.ErrCostExceedsCapacity)
}

// A call in the midst of which a rule turns the price on or off is credited at the price that it was charged.
func TestTheChargeWhileAPriceIsTurnedOn(t *testing.T) {
	t.Parallel()
	applied, shadow := ratelimit.Adaptive{Contract: hoard(1000), Apply: true}, ratelimit.Adaptive{Contract: hoard(1000)}
	upstream := ratelimit.Define("upstream", ratelimit.Adaptive{Contract: hoard(1e6), Apply: true})
	for name, change := range map[string]eraChange{"On": {before: shadow, after: applied}, "Off": {before: applied, after: shadow}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, charged := newMarket(t), map[float64]int{}
			m.share(t, "upstream", "account", 0.25)
			request := upstream.For("account").Cost(3)
			for reads := range int64(8) {
				var left atomic.Int64
				left.Store(1 << 40)
				m.limiter = m.with(t, ratelimit.Config{Policies: eraRules{"upstream": change.rule(t, upstream)}, AsOf: func() time.Time {
					if left.Add(-1) >= 0 {
						return changeInstant.Add(-time.Microsecond)
					}
					return changeInstant
				}})
				learn(t, m.limiter, request, 4)
				require.NoError(t, m.limiter.Reset(t.Context(), request))
				require.NoError(t, m.limiter.Charge(t.Context(), request.Price(0).Cost(500)))
				left.Store(reads)
				d, err := m.limiter.Take(t.Context(), request)
				require.NoError(t, err)
				left.Store(0)
				m.holds(t, request, 500-3*d.States[0].Charged)
				require.NoError(t, m.limiter.CreditTaken(t.Context(), d.At, request.Price(d.States[0].Charged)))
				m.holds(t, request, 500)
				charged[d.States[0].Charged]++
			}
			require.Len(t, charged, 2, "of %v", charged)
		})
	}
}

// failedOnce makes calls until the Observer receives a failure.
func (m *market) failedOnce(t *testing.T, limiter *ratelimit.Limiter, told *pricesTold, request ratelimit.Request) error {
	t.Helper()
	before := len(told.failures())
	m.pass(time.Second)
	eventually(t, "the exchange fails", func() bool {
		require.NoError(t, errOf(limiter.Check(t.Context(), request)), "no call fails for it")
		return len(told.failures()) > before
	})
	return told.failures()[before]
}

// Without its table the contract is in effect, or the price that was known. The Observer receives the error, and the first exchange that
// works writes the counts so far.
func TestAdaptiveWithoutItsTable(t *testing.T) {
	t.Parallel()
	m := newMarket(t)
	request, fresh := adaptive("upstream").For("account").Cost(2), adaptive("fresh").For("account")
	m.share(t, "upstream", "account", 0.5)
	learn(t, m.limiter, request, 2)
	m.exec(t, `ALTER TABLE ratelimit.prices RENAME TO away`)
	report(t, m.limiter, request, 3, 2)
	require.ErrorIs(t, m.failedOnce(t, m.limiter, m.pricesTold, request), ratelimit.ErrNotMigrated)
	for price, request := range map[float64]ratelimit.Request{2: request, 1: fresh} {
		d, err := m.limiter.Take(t.Context(), request)
		require.NoError(t, err)
		require.True(t, d.Allowed)
		require.Equal(t, price, d.States[0].Price)
	}
	report(t, m.limiter, request, 3, 0)
	m.exec(t, `ALTER TABLE ratelimit.away RENAME TO prices`)
	m.told(t, m.limiter, request, 8) // too few to end the epoch
	found := m.known(t, "upstream", "account")
	require.Equal(t, 12.0, found.Accepted)
	require.Equal(t, 4.0, found.Throttled)
}

// If a connection breaks, at most the reports in flight are lost. If they arrived, they count once.
func TestAdaptiveConnectionBreaks(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		side cut
		want known
	}{
		"BeforeTheRequest": {cutRequest, known{Outcomes: 4, Accepted: 3, Throttled: 1}},
		"BeforeTheAnswer":  {cutAnswer, known{Outcomes: 9, Accepted: 7, Throttled: 2}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			wire := &cutter{}
			m := newMarket(t, wire.on)
			request := adaptive("cut-upstream").For("account")
			m.share(t, "cut-upstream", "account", 0.5)
			learn(t, m.limiter, request, 2) // so that no exchange is under way
			report(t, m.limiter, request, 4, 1)
			wire.arm("account", c.side, 1)
			require.Error(t, m.failedOnce(t, m.limiter, m.pricesTold, adaptive("cut-upstream").For("other")))
			report(t, m.limiter, request, 3, 1)
			m.told(t, m.limiter, request, c.want.Outcomes)
			found := m.known(t, "cut-upstream", "account")
			require.Equal(t, c.want, known{Outcomes: found.Outcomes, Accepted: found.Accepted, Throttled: found.Throttled})
		})
	}
}

// With all connections in use a decision on a connection of its own goes on, and nothing that was counted is lost.
func TestAdaptiveWithoutAConnection(t *testing.T) {
	t.Parallel()
	m := newMarket(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	told := &pricesTold{}
	// Long enough for each exchange on a busy machine: what an exchange that ends too early had sent is lost.
	limiter := m.with(t, ratelimit.Config{AsOf: m.now, Observer: told, Timeout: time.Second})
	request := adaptive("upstream").For("account")
	tx := m.begin(t, levels[0].level)
	bound := limiter.WithTx(tx)
	report(t, bound, request, 6, 0)
	require.ErrorIs(t, m.failedOnce(t, bound, told, request), context.DeadlineExceeded)
	require.NoError(t, tx.Rollback(t.Context()))
	m.pass(time.Second)
	eventually(t, "all is written", func() bool {
		_ = limiter.Report(t.Context(), request.Cost(0), ratelimit.Outcome{}) // which a busy machine may give no answer in time
		return m.known(t, "upstream", "account").Accepted == 6
	})
}

// A clock that was ahead leaves no epoch that lasts until it comes there.
func TestAdaptiveClockStepsBack(t *testing.T) {
	t.Parallel()
	m := newMarket(t)
	request := adaptive("upstream").For("account")
	m.pass(time.Hour)
	m.share(t, "upstream", "account", 0.5)
	m.set(clockNoon)
	learn(t, m.limiter, request, 2)
	report(t, m.limiter, request, 1, 0)
	m.pass(time.Second)
	eventually(t, "the epoch begins again", func() bool {
		require.NoError(t, errOf(m.limiter.Check(t.Context(), request)))
		return m.known(t, "upstream", "account").Epoch == 1
	})
	found := m.known(t, "upstream", "account")
	require.Equal(t, m.now().UnixMicro(), found.BegunUs)
	require.Equal(t, 0.5, found.Share)
}

// Prune deletes only the states of upstreams without recent reports. It waits for no row, also by statements that name one row each:
// the next one forgets all that are old.
func TestAdaptivePrune(t *testing.T) {
	t.Parallel()
	for name, isRouted := range map[string]bool{"Plain": false, "Routed": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMarket(t)
			if isRouted {
				m.seemDistributed(t)
			}
			m.share(t, "upstream", "idle", 0.5)
			m.share(t, "upstream", "held", 0.5)
			m.pass(8 * ratelimit.Day)
			m.share(t, "upstream", "busy", 0.5)
			holder := m.begin(t, pgx.ReadCommitted)
			require.NoError(t, errOf(holder.Exec(t.Context(), `SELECT FROM ratelimit.prices WHERE key = 'held' FOR UPDATE`)))
			prune := func() { require.NoError(t, errOf(m.limiter.Prune(patience(t), adaptive("upstream")))) }
			prune()
			if !isRouted {
				require.Equal(t, 0.5, m.known(t, "upstream", "held").Share)
				require.Equal(t, 1.0, m.known(t, "upstream", "idle").Share)
			}
			require.NoError(t, holder.Rollback(t.Context()))
			prune()
			require.Equal(t, 1.0, m.known(t, "upstream", "held").Share)
			require.Equal(t, 1.0, m.known(t, "upstream", "idle").Share)
			require.Equal(t, 0.5, m.known(t, "upstream", "busy").Share)
		})
	}
}

// A row of prices that another transaction has locked, or is inserting, delays no other row, and its outcomes are not lost.
func TestAdaptiveSkipsALockedRow(t *testing.T) {
	t.Parallel()
	const made, locked = `INSERT INTO ratelimit.prices VALUES ('held', 'account', 0, $1, $1, 0, 0, 0, 0.5, false, 0)`,
		`UPDATE ratelimit.prices SET epoch = 0 WHERE name = 'held' AND begun_us = $1`
	for name, c := range map[string]struct {
		routed bool
		hold   string
	}{
		"Locked":       {false, locked},
		"Made":         {false, made},
		"RoutedLocked": {true, locked},
		"RoutedMade":   {true, made},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMarket(t)
			if c.routed {
				m.seemDistributed(t)
			}
			limiter, told := m.limiter, m.pricesTold
			free, held := adaptive("z-free").For("account"), adaptive("held").For("account")
			m.share(t, "z-free", "account", 0.5)
			learn(t, limiter, free, 2)
			if c.hold == locked {
				m.share(t, "held", "account", 0.5)
			}
			holder := m.begin(t, pgx.ReadCommitted)
			require.NoError(t, errOf(holder.Exec(t.Context(), c.hold, m.now().UnixMicro())))
			report(t, limiter, held, 3, 2)
			eventually(t, "the observer is told", func() bool { return len(told.failures()) > 0 })
			report(t, limiter, free, 4, 0)
			m.told(t, limiter, free, 4)
			require.ErrorContains(t, told.failures()[0], "55P03")
			require.ErrorContains(t, told.failures()[0], "held")
			require.NoError(t, holder.Commit(t.Context()))
			report(t, limiter, held, 1, 0)
			m.told(t, limiter, held, 6)
			found := m.known(t, "held", "account")
			require.Equal(t, 4.0, found.Accepted)
			require.Equal(t, 2.0, found.Throttled)
		})
	}
}
