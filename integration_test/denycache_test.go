package integration_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
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

func TestRefusalCacheIsClosedWithItsLimiter(t *testing.T) {
	t.Parallel()
	cached := setup(t).with(t, ratelimit.Config{RefusalCache: refusalEntries})
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
func TestRefusalCacheForgetsWhatWasGivenBack(t *testing.T) {
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

// An answer from the cache equals the database's, to the last digit. Two limiters, one with a cache, go through the same history at
// the same instants.
func TestRefusalCacheChangesNoAnswer(t *testing.T) {
	t.Parallel()
	steps := testsize.Of(400, 4000)
	b := setup(t)
	clock := clockNoon
	asOf := func() time.Time { return clock }
	twins := [2]*twin{
		{name: "plain", limiter: b.with(t, ratelimit.Config{AsOf: asOf})},
		{name: "cached", limiter: b.with(t, ratelimit.Config{AsOf: asOf, RefusalCache: 4})},
	}
	limits := []ratelimit.Limit{
		ratelimit.Define("bucket", ratelimit.TokenBucket{Rate: 10, Period: time.Second}),
		ratelimit.Define("window", ratelimit.FixedWindow{Rate: 7, Period: time.Second, Capacity: 9, Start: clockNoon}),
		ratelimit.Define("slow", ratelimit.TokenBucket{Rate: 8, Period: time.Minute}),
	}
	src := testsize.Rand(t)
	for step := range steps {
		clock = clock.Add(time.Duration(src.IntN(60_000)) * time.Microsecond)
		which, seed := src.Perm(len(limits))[:1+src.IntN(2)], src.Uint64()
		var decisions [2]ratelimit.Decision
		for i, w := range twins {
			same := rand.New(rand.NewPCG(seed, 0))
			var requests []ratelimit.Request
			for _, j := range which {
				requests = append(requests, limits[j].For(fmt.Sprint(w.name, " ", same.IntN(3))).Cost(float64(1+same.IntN(7))))
			}
			var err error
			decisions[i], err = w.step(t.Context(), same, requests)
			require.NoError(t, err, "step %d", step)
		}
		requireSameDecision(t, step, decisions[0], decisions[1])
	}
}

// twin is a limiter that goes through a history.
type twin struct {
	name     string
	limiter  *ratelimit.Limiter
	reserved []reserved
}

type reserved struct {
	id       string
	requests []ratelimit.Request
}

// step makes one call of any kind, and returns the decision if it was to take.
func (w *twin) step(ctx context.Context, src *rand.Rand, requests []ratelimit.Request) (d ratelimit.Decision, err error) {
	l, kind := w.limiter, src.IntN(40)
	switch {
	case kind == 0:
		return d, l.Reset(ctx, requests...)
	case kind == 1:
		return d, l.Credit(ctx, requests...)
	case kind == 2:
		return d, l.Charge(ctx, requests...)
	case kind < 6:
		return d, w.reserve(ctx, l, requests)
	case kind < 10 && len(w.reserved) > 0:
		return d, w.end(ctx, src, w.reserved[src.IntN(len(w.reserved))])
	case kind < 13: // in a transaction or a nested one, of which one in three is rolled back
		err := l.InTx(ctx, func(tx pgx.Tx) error {
			err := pgx.BeginFunc(ctx, tx, func(nested pgx.Tx) error {
				inner := tx
				if src.IntN(2) == 0 {
					inner = nested
				}
				bound := l.WithTx(inner)
				if src.IntN(4) == 0 {
					return bound.Reset(ctx, requests...)
				}
				_, err := bound.Take(ctx, requests...)
				return err
			})
			if err == nil && src.IntN(3) == 0 {
				err = errUndone
			}
			return err
		})
		if errors.Is(err, errUndone) {
			err = nil
		}
		return d, err
	}
	return l.Take(ctx, requests...)
}

func (w *twin) reserve(ctx context.Context, limiter *ratelimit.Limiter, requests []ratelimit.Request) error {
	r, err := limiter.Reserve(ctx, requests...)
	if err == nil && r.Allowed {
		w.reserved = append(w.reserved, reserved{r.ID, requests})
	}
	return err
}

// end settles a reservation with more or less than it took, cancels it, or renews it.
func (w *twin) end(ctx context.Context, src *rand.Rand, r reserved) (err error) {
	switch src.IntN(3) {
	case 0:
		err = w.limiter.Settle(ctx, r.id, r.requests[0].Cost(float64(src.IntN(9))))
	case 1:
		err = w.limiter.Cancel(ctx, r.id)
	default:
		_, err = w.limiter.Renew(ctx, r.id)
	}
	if errors.Is(err, ratelimit.ErrReservationEnded) {
		return nil
	}
	return err
}

// requireSameDecision compares two decisions, except the other limits of a refused call, for which the cache has older values.
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
