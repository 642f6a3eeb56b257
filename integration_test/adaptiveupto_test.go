package integration_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TakeUpTo of an adaptive limit returns the cost of the units and the price.
func TestAdaptiveTakeUpTo(t *testing.T) {
	t.Parallel()
	m := newMarket(t)
	upstream := ratelimit.Define("upstream", ratelimit.Adaptive{Contract: hoard(50), Apply: true})
	plain := ratelimit.Define("plain", hoard(50))
	m.share(t, "upstream", "account", 0.5)
	learn(t, m.limiter, upstream.For("account"), 2)
	n, d, err := m.limiter.TakeUpTo(t.Context(), 40, upstream.For("account"))
	require.NoError(t, err)
	require.Equal(t, 25, n, "at a price of 2")
	require.Equal(t, 25.0, d.States[0].Cost)
	require.Equal(t, 2.0, d.States[0].Price)
	n, d, err = m.limiter.TakeUpTo(t.Context(), 40, plain.For("account"))
	require.NoError(t, err)
	require.Equal(t, 40, n)
	require.Equal(t, 40.0, d.States[0].Cost)
	_, err = m.limiter.Take(t.Context(), ratelimit.Borrow(plain.For("account"), upstream.Global()))
	require.ErrorIs(t, err, ratelimit.ErrInvalidRequest)
}
