package ratelimit

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// newUpstream returns a Limiter on a clock that stands still, and what it knows of the upstream of a request.
func newUpstream(t *testing.T, now time.Time, r Request) (*Limiter, *upstream) {
	t.Helper()
	l, err := New(&answering{}, Config{AsOf: func() time.Time { return now }})
	require.NoError(t, err)
	return l, l.prices.find(bucket.Key{Name: r.limit.Name(), Key: r.key}, now.UnixMicro())
}

// An upstream that asked for no pause has none, before 1970 too.
func TestNoPauseIsLearntBefore1970(t *testing.T) {
	t.Parallel()
	for _, now := range []time.Time{time.Unix(-86_400, 0), time.Unix(86_400, 0)} {
		l, u := newUpstream(t, now, Define("upstream", Adaptive{Contract: PerSecond(100), Apply: true}).For("ada"))
		l.prices.learn(t.Context(), []*exchanged{{upstream: u, report: store.Report{
			HasUpstream: true, Upstream: store.Upstream{Share: 1, NowUs: now.UnixMicro()},
		}}})
		require.Zero(t, u.pausedUntil.Load(), "%v", now)
	}
}

// A call reads its price before it begins an exchange, which runs beside the call: what the exchange learns holds for later calls.
func TestAPriceIsReadBeforeItsExchangeBegins(t *testing.T) {
	t.Parallel()
	request := Define("upstream", Adaptive{Contract: PerSecond(100), Apply: true}).For("ada")
	l, u := newUpstream(t, time.Unix(86_400, 0), request)
	var now int64
	s := subject{limit: request.limit, mode: On}
	read, err := l.prices.price(t.Context(), &s, &request, request.key, &now)
	require.NoError(t, err)
	require.Same(t, u, read)
	require.InDelta(t, 1, s.price, 0)
	require.False(t, u.used.Load(), "no exchange has begun")
	require.Zero(t, u.askedAt.Load())
	l.prices.closed = true // so that the exchange does not run
	require.NoError(t, (&plan{}).arrange(t.Context(), l, verbTake, []Request{request}))
	require.True(t, u.used.Load(), "the call asks for an exchange once it knows its price")
}
