package integration_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// failedOnce makes calls until the Observer receives a failure.
func (m *market) failedOnce(t *testing.T, limiter *ratelimit.Limiter, told *pricesTold, request ratelimit.Request) error {
	t.Helper()
	before := len(told.failures())
	m.pass(time.Second)
	eventually(t, "the exchange fails", func() bool {
		_, err := limiter.Check(t.Context(), request)
		require.NoError(t, err, "no call fails for it")
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
	limiter := m.with(t, ratelimit.Config{AsOf: m.now, Observer: told, Timeout: 50 * time.Millisecond})
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
			prune := func() { require.NoError(t, errOf(m.limiter.Prune(patience(t)))) }
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
func TestAdaptiveGoesPastARowThatIsHeld(t *testing.T) {
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
