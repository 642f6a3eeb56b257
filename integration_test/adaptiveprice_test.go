package integration_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

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
	m.limiter = m.synchronous(t, m.pricesTold)
	other := m.synchronous(t, &pricesTold{})
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
	conn, err := pgx.ConnectConfig(t.Context(), m.pool.Config().ConnConfig)
	require.NoError(t, err)
	defer conn.Close(t.Context())
	limiter, err := ratelimit.New(conn, ratelimit.Config{AsOf: m.now})
	require.NoError(t, err)
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
	_, err = m.limiter.Renew(t.Context(), again.ID)
	require.NoError(t, err)
	_, err = m.limiter.Reserve(t.Context(), request.Cost(16))
	require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
}

// A call in the midst of which a rule turns the price on or off is credited at the price that it was charged.
func TestWhatIsChargedWhileAPriceIsTurnedOn(t *testing.T) {
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
