package integration_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const refusalEntries = 1000

// A refusal is answered from memory for a second. The clock of the test stands still but where it sleeps.
func TestRefusalCacheAnswersWithoutTheDatabase(t *testing.T) {
	t.Parallel()
	for name, requests := range map[string][]ratelimit.Request{
		"OneLimit":   {tight.For("empty")},
		"SeveralOne": {roomy.For("key"), tight.For("empty"), other.Global()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := postgrestest.NewDatabase(t)
			synctest.Test(t, func(t *testing.T) {
				w := &wire{}
				b := countedOn(t, url, w)
				cached := b.with(t, ratelimit.Config{RefusalCache: refusalEntries})
				first, err := cached.Take(t.Context(), requests...)
				require.NoError(t, err)
				refuse := func(age time.Duration) {
					d, err := cached.Take(t.Context(), requests...)
					require.NoError(t, err)
					require.False(t, d.Allowed)
					require.ErrorIs(t, d.Err(), ratelimit.ErrLimited)
					require.Equal(t, first.RetryAfter-age, d.RetryAfter)
					require.Len(t, d.States, len(requests))
				}
				require.Zero(t, w.count(func() {
					for range 100 {
						refuse(0)
					}
				}))
				const last = time.Second - time.Nanosecond
				time.Sleep(last)
				require.Zero(t, w.count(func() { refuse(last.Truncate(time.Microsecond)) }))
				time.Sleep(time.Second - last)
				for why, limiter := range map[string]*ratelimit.Limiter{"it is too old": cached, "it is off by default": b.limiter} {
					require.NotZero(t, w.count(func() {
						allowed, err := taking(requests...)(t.Context(), limiter)
						require.NoError(t, err)
						require.False(t, allowed)
					}), why)
				}
				require.NotZero(t, w.count(func() { requireAllowed(t, taking(roomy.For("key")), cached) }))
			})
		})
	}
}

// The next answer shows tokens that a transaction of the Limiter has given back.
func TestRefusalCacheForgetsWhatATransactionGaveBack(t *testing.T) {
	t.Parallel()
	b := setup(t)
	cached := b.with(t, ratelimit.Config{RefusalCache: refusalEntries})
	commit := func(ctx context.Context, request ratelimit.Request) error {
		return cached.InTx(ctx, func(tx pgx.Tx) error {
			if err := cached.WithTx(tx).Reset(ctx, request); err != nil {
				return err
			}
			requireRefused(t, cached, []ratelimit.Request{request}) // it is not committed
			return nil
		})
	}
	begun := func(ctx context.Context, request ratelimit.Request) error {
		return pgx.BeginFunc(ctx, b.pool, func(tx pgx.Tx) error { return cached.WithTx(tx).Credit(ctx, request) })
	}
	for name, give := range map[string]func(context.Context, ratelimit.Request) error{"InTx": commit, "YourTransaction": begun} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			request := tight.For(t.Name())
			takeAll(t, cached, request)
			for range 3 {
				requireRefused(t, cached, []ratelimit.Request{request})
			}
			require.NoError(t, give(t.Context(), request))
			requireAllowed(t, taking(request), cached)
		})
	}
}

func TestRefusalCacheShowsWhatAnotherProcessGaveBackWithinASecond(t *testing.T) {
	t.Parallel()
	url := postgrestest.NewDatabase(t)
	synctest.Test(t, func(t *testing.T) { // on a clock that stands still but where the test sleeps
		b := countedOn(t, url, &wire{})
		cached := b.with(t, ratelimit.Config{RefusalCache: refusalEntries})
		requireRefused(t, cached, []ratelimit.Request{tight.For("empty")})
		require.NoError(t, b.limiter.Reset(t.Context(), tight.For("empty")))
		requireRefused(t, cached, []ratelimit.Request{tight.For("empty")})
		time.Sleep(time.Second)
		requireAllowed(t, taking(tight.For("empty")), cached)
	})
}

// A call with an unknown outcome may have taken tokens, so a cached refusal from before would return too short a wait.
func TestRefusalCacheForgetsWhatACallOfUnknownOutcomeMayHaveTaken(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "it loses the answer of a statement that commits")
	for name, test := range map[string]struct {
		lost string // the request whose answer is lost
		call func(ctx context.Context, limiter *ratelimit.Limiter, request ratelimit.Request) error
	}{
		"Take": {"ada", func(ctx context.Context, limiter *ratelimit.Limiter, request ratelimit.Request) error {
			_, err := limiter.Take(ctx, request)
			return err
		}},
		"Charge": {"commit\x00", func(ctx context.Context, limiter *ratelimit.Limiter, request ratelimit.Request) error {
			return limiter.Charge(ctx, request)
		}},
		"Reserve": {"commit\x00", func(ctx context.Context, limiter *ratelimit.Limiter, request ratelimit.Request) error {
			_, err := limiter.Reserve(ctx, request)
			return err
		}},
		"InTx": {"commit\x00", func(ctx context.Context, limiter *ratelimit.Limiter, request ratelimit.Request) error {
			return limiter.InTx(ctx, func(tx pgx.Tx) error {
				_, err := limiter.WithTx(tx).Take(ctx, request)
				return err
			})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := &cutter{}
			b := setup(t, c.on)
			limit := ratelimit.Define("ten", ratelimit.PerMinute(10))
			cached := b.with(t, ratelimit.Config{RefusalCache: refusalEntries, AsOf: func() time.Time { return clockNoon }})
			want := func(cost float64) (d ratelimit.Decision) {
				d, err := cached.Take(t.Context(), limit.For("ada").Cost(cost))
				require.NoError(t, err)
				return d
			}
			require.True(t, want(5).Allowed)
			require.Equal(t, 6*time.Second, want(6).RetryAfter)
			c.arm(test.lost, cutAnswer, 1)
			require.Error(t, test.call(t.Context(), cached, limit.For("ada").Cost(5)))
			require.Equal(t, 1, c.seen())
			require.Equal(t, 36*time.Second, want(6).RetryAfter)
		})
	}
}

// A verb that gives tokens back or takes them drops the refusals of its buckets: the next answer is as the bucket is.
func TestRefusalCacheForgetsTheBucketsOfEachVerb(t *testing.T) {
	t.Parallel()
	const reserved, second = 5.0, time.Second
	for verb, left := range map[string]float64{
		"Reset": 10, "Credit": 1, "CreditTaken": 1, "Charge": -1, "Cancel": reserved, "Settle": reserved - 9, "Renew": -reserved,
	} {
		limiter := inMemory.setup(t).with(t, ratelimit.Config{RefusalCache: refusalEntries, AsOf: func() time.Time { return clockNoon }})
		request := ratelimit.Define("ten", ratelimit.PerMinute(10)).For("ada")
		r, err := limiter.Reserve(t.Context(), request.Cost(reserved))
		require.NoError(t, err)
		requireAllowed(t, taking(request.Cost(5)), limiter)
		wait := func() time.Duration {
			d, err := limiter.Take(t.Context(), request.Cost(10))
			require.NoError(t, err)
			return d.RetryAfter
		}
		require.Equal(t, 60*second, wait())
		require.NoError(t, everyCall[verb](t.Context(), limiter, r.ID, request))
		require.Equal(t, time.Duration(10-left)*6*second, wait(), verb)
	}
}
