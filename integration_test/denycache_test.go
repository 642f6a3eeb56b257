package integration_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const denyEntries = 1000

// A refusal is answered from memory for a second. The clock of the test stands still but where it sleeps.
func TestDenyCacheAnswersWithoutTheDatabase(t *testing.T) {
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
				cached := b.with(t, ratelimit.Config{DenyCache: denyEntries})
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

func TestDenyCacheIsClosedWithItsLimiter(t *testing.T) {
	t.Parallel()
	cached := setup(t).with(t, ratelimit.Config{DenyCache: denyEntries})
	takeAll(t, cached, tight.For("key"))
	requireRefused(t, cached, []ratelimit.Request{tight.For("key")})
	several := []ratelimit.Request{tight.For("key"), roomy.For("key")}
	_, err := cached.Take(t.Context(), several...)
	require.NoError(t, err)
	require.NoError(t, cached.Close(t.Context()))
	for _, requests := range [][]ratelimit.Request{several[:1], several} {
		_, err := cached.Take(t.Context(), requests...)
		require.ErrorIs(t, err, ratelimit.ErrClosed)
	}
}

// What gives tokens back through the Limiter shows in the next answer.
func TestDenyCacheForgetsWhatWasGivenBack(t *testing.T) {
	t.Parallel()
	b := setup(t)
	cached := b.with(t, ratelimit.Config{DenyCache: denyEntries})
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
	reserved := func(end func(ctx context.Context, id string, request ratelimit.Request) error) func(context.Context, ratelimit.Request) error {
		return func(ctx context.Context, request ratelimit.Request) error {
			if err := cached.Reset(ctx, request); err != nil {
				return err
			}
			r, err := cached.Reserve(ctx, request)
			if err != nil {
				return err
			}
			requireRefused(t, cached, []ratelimit.Request{request})
			return end(ctx, r.ID, request)
		}
	}
	for name, give := range map[string]func(context.Context, ratelimit.Request) error{
		"Reset":  func(ctx context.Context, request ratelimit.Request) error { return cached.Reset(ctx, request) },
		"Credit": func(ctx context.Context, request ratelimit.Request) error { return cached.Credit(ctx, request) },
		"InTx":   commit, "YourTransaction": begun,
		"Cancel": reserved(func(ctx context.Context, id string, _ ratelimit.Request) error { return cached.Cancel(ctx, id) }),
		"Settle": reserved(func(ctx context.Context, id string, request ratelimit.Request) error {
			return cached.Settle(ctx, id, request.Cost(0))
		}),
	} {
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
	t.Run("APolicyThatChanged", func(t *testing.T) {
		t.Parallel()
		request := tight.For(t.Name())
		takeAll(t, cached, request)
		requireRefused(t, cached, []ratelimit.Request{request})
		faster := ratelimit.Define(tight.Name(), ratelimit.TokenBucket{Rate: 1, Period: time.Microsecond, Capacity: 1})
		requireAllowed(t, taking(faster.For(t.Name())), cached)
	})
	t.Run("ATransactionThatWasRolledBackGaveNothing", func(t *testing.T) {
		t.Parallel()
		request := tight.For(t.Name())
		takeAll(t, cached, request)
		require.ErrorIs(t, cached.InTx(t.Context(), func(tx pgx.Tx) error {
			require.NoError(t, cached.WithTx(tx).Reset(t.Context(), request))
			requireAllowed(t, taking(request), cached.WithTx(tx))
			return context.Canceled
		}), context.Canceled)
		requireRefused(t, cached, []ratelimit.Request{request})
	})
}

func TestDenyCacheShowsWhatAnotherProcessGaveBackWithinASecond(t *testing.T) {
	t.Parallel()
	url := postgrestest.NewDatabase(t)
	synctest.Test(t, func(t *testing.T) { // on a clock that stands still but where the test sleeps
		b := countedOn(t, url, &wire{})
		cached := b.with(t, ratelimit.Config{DenyCache: denyEntries})
		requireRefused(t, cached, []ratelimit.Request{tight.For("empty")})
		require.NoError(t, b.limiter.Reset(t.Context(), tight.For("empty")))
		requireRefused(t, cached, []ratelimit.Request{tight.For("empty")})
		time.Sleep(time.Second)
		requireAllowed(t, taking(tight.For("empty")), cached)
	})
}

// A call that the cache answers gets what the database would have answered, to the last digit: two limiters,
// one with a cache, go through the same history at the same instants.
func TestDenyCacheChangesNoAnswer(t *testing.T) {
	t.Parallel()
	const steps = 3000
	b := setup(t)
	clock := clockNoon
	asOf := func() time.Time { return clock }
	cached, plain := b.with(t, ratelimit.Config{AsOf: asOf, DenyCache: 4}), b.with(t, ratelimit.Config{AsOf: asOf})
	limits := []ratelimit.Limit{
		ratelimit.Define("bucket", ratelimit.TokenBucket{Rate: 10, Period: time.Second}),
		ratelimit.Define("window", ratelimit.FixedWindow{Rate: 7, Period: time.Second, Capacity: 9, Start: clockNoon}),
		ratelimit.Define("slow", ratelimit.TokenBucket{Rate: 8, Period: time.Minute}),
	}
	src := rand.New(rand.NewPCG(1, 2))
	for step := range steps {
		clock = clock.Add(time.Duration(src.IntN(60_000)) * time.Microsecond)
		var requests, twins []ratelimit.Request
		for _, i := range src.Perm(len(limits))[:1+src.IntN(2)] {
			key, cost := fmt.Sprint(src.IntN(3)), float64(1+src.IntN(7))
			requests = append(requests, limits[i].For("cached "+key).Cost(cost))
			twins = append(twins, limits[i].For("plain "+key).Cost(cost))
		}
		switch src.IntN(20) {
		case 0:
			require.NoError(t, cached.Reset(t.Context(), requests...))
			require.NoError(t, plain.Reset(t.Context(), twins...))
		case 1:
			require.NoError(t, cached.Credit(t.Context(), requests...))
			require.NoError(t, plain.Credit(t.Context(), twins...))
		case 2:
			require.NoError(t, cached.Charge(t.Context(), requests...))
			require.NoError(t, plain.Charge(t.Context(), twins...))
		default:
			got, err := cached.Take(t.Context(), requests...)
			require.NoError(t, err)
			want, err := plain.Take(t.Context(), twins...)
			require.NoError(t, err)
			requireSameDecision(t, step, want, got)
		}
	}
}

// requireSameDecision checks everything that callers see of two decisions but the other limits of a call
// that was refused, of which the cache knows what they held when it asked.
func requireSameDecision(t *testing.T, step int, want, got ratelimit.Decision) {
	t.Helper()
	require.Equal(t, want.Allowed, got.Allowed, "step %d", step)
	require.True(t, want.At.Equal(got.At), "step %d", step)
	for i := range want.States {
		w, g := want.States[i], got.States[i]
		require.Equal(t, w.Limit, g.Limit)
		require.Equal(t, w.Cost, g.Cost)
		if w.Allowed && !want.Allowed {
			continue
		}
		require.Equal(t, w.Allowed, g.Allowed, "step %d", step)
		require.Equal(t, w.RetryAfter, g.RetryAfter, "step %d", step)
		require.InDelta(t, w.Remaining, g.Remaining, 1e-9, "step %d", step)
		require.Equal(t, w.ResetAfter, g.ResetAfter, "step %d", step)
	}
}

// Allowing is never from memory.
func TestDenyCacheAdmitsExactlyTheCapacity(t *testing.T) {
	t.Parallel()
	heavy(t, "ten thousand takes; TestTakeAdmitsExactlyTheCapacity is the same without a cache")
	b := setup(t)
	for _, several := range []bool{false, true} {
		for _, shards := range []int{1, 4} {
			name := fmt.Sprintf("Several=%v/Shards=%d", several, shards)
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				hot := ratelimit.Define("hot", ratelimit.TokenBucket{Rate: raceCapacity, Period: century, Shards: shards})
				for _, c := range callers() {
					cached := b.with(t, ratelimit.Config{DenyCache: denyEntries})
					race{c, cached, hot, racersTries, name + c.name, false, several, 1e-3}.run(t, b)
				}
			})
		}
	}
}
