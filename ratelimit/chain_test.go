package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// calling returns a call for the requests.
func calling(t testing.TB, requests ...Request) *call {
	t.Helper()
	c := &call{}
	require.NoError(t, c.plan.arrange(t.Context(), &Limiter{}, verbTake, requests))
	c.Asks = c.plan.asks
	return c
}

// refused has the Limiter remember that a call was refused now, because its buckets held these tokens.
func refused(t testing.TB, l *Limiter, tokens []float64, requests ...Request) {
	t.Helper()
	c, now := calling(t, requests...), time.Now().UnixMicro()
	for i, value := range tokens {
		c.Answers = append(c.Answers, bucket.Answer{State: bucket.State{Value: value, TS: now}, Now: now, Allowed: value >= c.Asks[i].Cost})
	}
	l.cache.Keep(l.cache.Send(c.Asks, nil), c.Asks, c.Answers)
}

// The refusal cache reports a refusal of several limits in the order of the requests.
func TestARememberedRefusalIsToldInTheOrderAsked(t *testing.T) {
	t.Parallel()
	minute, hour := Define("minute", PerMinute(10)), Define("hour", PerHour(100))
	l, err := New(&struct{ Pool }{}, Config{RefusalCache: 100})
	require.NoError(t, err)
	refused(t, l, []float64{50, 3}, minute.For("key").Cost(4), hour.For("key")) // in the order of locking
	d, err := l.Take(t.Context(), minute.For("key").Cost(4), hour.For("key"))
	require.NoError(t, err)
	require.False(t, d.Allowed)
	require.InDelta(t, 6, d.RetryAfter.Seconds(), 1)
	require.InDelta(t, 3, d.Remaining, 1)
	require.Equal(t, "minute", d.States[0].Limit.Name())
	require.False(t, d.States[0].Allowed)
	require.InDelta(t, 4, d.States[0].Cost, 0)
	require.True(t, d.States[1].Allowed)
	require.InDelta(t, 50, d.States[1].Remaining, 1)
}

func BenchmarkRefusalCache(b *testing.B) {
	request := Define("cached", TokenBucket{Rate: 1, Period: math.MaxInt32 * time.Microsecond}).For("user:4711")
	l, err := New(&struct{ Pool }{}, Config{RefusalCache: 1000})
	require.NoError(b, err)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if i%10_000 == 0 { // before it is too old
			refused(b, l, []float64{0}, request)
		}
		if decision, err := l.Take(b.Context(), request); err != nil || decision.Allowed {
			b.Fatal(decision, err)
		}
	}
}

// switching is a pool that changes to another one.
type switching struct{ Pool }

// The Observer receives a Failed if prefetched tokens cannot be returned.
func TestTokensThatCannotBeReturnedAreReported(t *testing.T) {
	t.Parallel()
	pool, heard := &switching{&answering{rows: oneRow{allowed: true, value: 1e12}}}, &heardEvents{}
	limiter, err := New(pool, Config{Observer: heard})
	require.NoError(t, err)
	request := Define("hot", TokenBucket{Rate: 1e6, Period: time.Second, Capacity: 1e12, Prefetch: time.Hour}).For("alice")
	for range 4 { // so that tokens are prefetched
		require.NoError(t, limiter.Require(t.Context(), request.Cost(1e10)))
	}
	pool.Pool = &nowhere{}
	_ = limiter.Close(t.Context())
	i := slices.IndexFunc(heard.events, func(e Event) bool { _, is := e.(Failed); return is })
	require.GreaterOrEqual(t, i, 0)
	failed := heard.events[i].(Failed)
	require.Equal(t, "return hot", failed.Verb+" "+failed.Limit)
	require.ErrorIs(t, failed.Err, errNowhere)
}

// BenchmarkPrefetch is what a Take costs that is answered with prefetched tokens, with the Decision, but without the database: all tokens are prefetched before.
func BenchmarkPrefetch(b *testing.B) {
	limit := Define("hot", TokenBucket{Rate: 1e6, Period: time.Second, Capacity: 1e12, Prefetch: time.Hour})
	for _, keys := range []int{1, 1000} {
		limiter, requests := prefetchedFor(b, limit, keys)
		b.Run(fmt.Sprintf("keys=%d", keys), func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if d, err := limiter.Take(b.Context(), requests[i%keys]); err != nil || !d.Allowed {
					b.Fatal(d, err)
				}
			}
		})
		b.Run(fmt.Sprintf("keys=%d/parallel", keys), func(b *testing.B) {
			b.ReportAllocs()
			var workers atomic.Int64
			b.RunParallel(func(pb *testing.PB) {
				for i := int(workers.Add(1)) * 37; pb.Next(); i++ {
					if d, err := limiter.Take(b.Context(), requests[i%keys]); err != nil || !d.Allowed {
						b.Fatal(d, err)
					}
				}
			})
		})
	}
}

// prefetchedFor returns a Limiter that has prefetched tokens of each of that many keys.
func prefetchedFor(b *testing.B, limit Limit, keys int) (*Limiter, []Request) {
	b.Helper()
	limiter, err := New(&answering{rows: oneRow{allowed: true, value: 1e12}}, Config{})
	require.NoError(b, err)
	requests := make([]Request, keys)
	for i := range requests {
		requests[i] = limit.For(fmt.Sprint("key ", i))
		for range 4 { // so the prefetch holds at least as many tokens
			d, err := limiter.Take(b.Context(), requests[i].Cost(1e10))
			require.NoError(b, err)
			require.True(b, d.Allowed)
		}
	}
	return limiter, requests
}

// onRule is a source without rules that runs a function for each request, before the request reads its price.
type onRule func()

func (f onRule) RulingFor(Limit, string, string) *Ruling { f(); return nil }
func (onRule) RulingsOf(string) []*Ruling                { return nil }

// nowhere is a pool without a server, which counts statements.
type nowhere struct{ sent atomic.Int64 }

var errNowhere = errors.New("there is no server")

func (*nowhere) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, errNowhere
}

func (p *nowhere) Query(context.Context, string, ...any) (pgx.Rows, error) {
	p.sent.Add(1)
	return nil, errNowhere
}

func (*nowhere) BeginTx(context.Context, pgx.TxOptions) (pgx.Tx, error) { return nil, errNowhere }

func (*nowhere) SendBatch(_ context.Context, batch *pgx.Batch) pgx.BatchResults {
	return pgx.FailedBatchResults(batch, errNowhere)
}

// TestACallReadsItsPricesBeforeAnExchangeBegins: an exchange that begins with the first price of a call could change the second.
func TestACallReadsItsPricesBeforeAnExchangeBegins(t *testing.T) {
	t.Parallel()
	api := Define("api", Adaptive{Contract: PerSecond(100), Apply: true})
	keys := []string{"ada", "bob", "eve"}
	for name, c := range map[string]struct {
		call  func(context.Context, *Limiter, ...Request) error
		plans int
	}{
		"Take": {func(ctx context.Context, l *Limiter, r ...Request) error { _, err := l.Take(ctx, r...); return err }, 1},
		"Wait": {func(ctx context.Context, l *Limiter, r ...Request) error { _, err := l.Wait(ctx, r...); return err }, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				pool, asked := &nowhere{}, 0
				policies := onRule(func() {
					asked++
					synctest.Wait() // for an exchange that has begun
					require.Zero(t, pool.sent.Load(), "before price %d", asked)
				})
				limiter, err := New(pool, Config{Policies: policies, NoBatching: true, AsOf: func() time.Time { return time.UnixMicro(1) }})
				require.NoError(t, err)
				require.Error(t, c.call(t.Context(), limiter, api.For(keys[0]), api.For(keys[1]), api.For(keys[2]))) // there is no server
				require.Equal(t, c.plans*len(keys), asked)
				synctest.Wait()
				require.Positive(t, pool.sent.Load())
			})
		})
	}
}
