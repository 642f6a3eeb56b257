package integration_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

const refusalEntries = 1000

// A refusal is answered from memory for a second, without the database, also if another process gives back meanwhile.
func TestRefusalCacheAnswersWithoutTheDatabase(t *testing.T) {
	t.Parallel()
	url := postgrestest.NewDatabase(t)
	synctest.Test(t, func(t *testing.T) { // on a clock that stands still but where the test sleeps
		w := &wire{}
		b := countedOn(t, url, w)
		cached := b.with(t, ratelimit.Config{RefusalCache: refusalEntries})
		several := []ratelimit.Request{roomy.For("key"), tight.For("empty"), other.Global()}
		refuses := func(l *ratelimit.Limiter) int { return w.count(func() { requireRefused(t, l, several) }) }
		require.NotZero(t, refuses(cached))
		require.Zero(t, refuses(cached))
		require.NotZero(t, refuses(b.limiter), "it is off by default")
		require.NotZero(t, w.count(func() { requireAllowed(t, taking(roomy.For("another")), cached) }))
		require.NoError(t, b.limiter.Reset(t.Context(), tight.For("empty")))
		time.Sleep(time.Second - time.Nanosecond)
		require.Zero(t, refuses(cached))
		time.Sleep(time.Nanosecond)
		requireAllowed(t, taking(several...), cached)
	})
}

// The next answer shows tokens that a transaction of the Limiter has given back.
func TestRefusalCacheForgetsAfterATransactionReturnsTokens(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, on backend) {
		b, ctx := on.setup(t), t.Context()
		cached := b.with(t, ratelimit.Config{RefusalCache: refusalEntries})
		inTx := func(give func(tx pgx.Tx, request ratelimit.Request) error) func(ratelimit.Request) error {
			return func(request ratelimit.Request) error {
				return cached.InTx(ctx, func(tx pgx.Tx) error {
					err := give(tx, request)
					requireRefused(t, cached, []ratelimit.Request{request}) // it is not committed
					return err
				})
			}
		}
		reset := func(tx pgx.Tx, request ratelimit.Request) error { return cached.WithTx(tx).Reset(ctx, request) }
		for name, give := range map[string]func(ratelimit.Request) error{
			"InTx": inTx(reset),
			"InANestedTransaction": inTx(func(tx pgx.Tx, request ratelimit.Request) error {
				return pgx.BeginFunc(ctx, tx, func(nested pgx.Tx) error {
					return pgx.BeginFunc(ctx, nested, func(deep pgx.Tx) error { return reset(deep, request) })
				})
			}),
			"YourTransaction": func(request ratelimit.Request) error {
				return pgx.BeginTxFunc(ctx, b.db(), pgx.TxOptions{}, func(tx pgx.Tx) error { return cached.WithTx(tx).Credit(ctx, request) })
			},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				request := tight.For(t.Name())
				takeAll(t, cached, request)
				requireRefused(t, cached, []ratelimit.Request{request})
				require.NoError(t, give(request))
				requireAllowed(t, taking(request), cached)
			})
		}
	}, onPostgres, inMemory)
}

// A call with an unknown outcome may have taken tokens, so a cached refusal from before would return too short a wait.
func TestRefusalCacheForgetsAfterACallWithUnknownOutcome(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		lost string // the request whose answer is lost
		call call
	}{
		"Take":    {"ada", everyCall["Take"]},
		"Charge":  {"ada", everyCall["Charge"]},
		"Reserve": {"ada", everyCall["Reserve"]},
		"InTx": {"commit\x00", func(ctx context.Context, limiter *ratelimit.Limiter, id string, request ratelimit.Request) error {
			return limiter.InTx(ctx, func(tx pgx.Tx) error { return everyCall["Take"](ctx, limiter.WithTx(tx), id, request) })
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
			require.Error(t, test.call(t.Context(), cached, "", limit.For("ada").Cost(5)))
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

// hook keeps the refusals for Config.Refused, and the events of refusals, for a test that calls from one goroutine.
type hook struct {
	told   []ratelimit.Refusal
	events []event.Event
}

// hooked returns a limiter that tells the hook.
func (b *bundle) hooked(t *testing.T, config ratelimit.Config) (*ratelimit.Limiter, *hook) {
	t.Helper()
	h := &hook{}
	config.Refused = func(_ context.Context, r ratelimit.Refusal) { h.told = append(h.told, r) }
	config.Observer = observing(func(e event.Event) {
		if e, is := e.(ratelimit.Decided); is && !e.Decision.Allowed {
			h.events = append(h.events, e)
		}
	})
	return b.with(t, config), h
}

// A refusal in a transaction of InTx is reported when the transaction has ended, to the hook and to the Observer, also
// if its function ends it or panics. The random histories have other ends.
func TestRefusedIsCalledAfterTheTransaction(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, on backend) {
		b := on.setup(t)
		for name, refused := range map[string]func(tx pgx.Tx, take func(pgx.Tx) error) error{
			"AndPanicked": func(tx pgx.Tx, take func(pgx.Tx) error) error { panic(take(tx)) },
			"AndEndedByItsFunction": func(tx pgx.Tx, take func(pgx.Tx) error) error {
				return errors.Join(take(tx), tx.Rollback(context.Background()))
			},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				limiter, h := b.hooked(t, ratelimit.Config{})
				empty := tight.For(t.Name())
				takeAll(t, limiter, empty)
				var want ratelimit.Refusal
				require.Equal(t, name == "AndPanicked", ended(func() {
					_ = limiter.InTx(t.Context(), func(tx pgx.Tx) error {
						err := refused(tx, func(tx pgx.Tx) error {
							d, err := limiter.WithTx(tx).Take(ratelimit.WithRoute(t.Context(), "POST /"), empty)
							want = ratelimit.Refusal{Limit: tight.Name(), Key: t.Name(), Route: "POST /", Cost: 1, At: d.At}
							return errors.Join(err, d.Err())
						})
						if len(h.told)+len(h.events) > 0 {
							return fmt.Errorf("told before the transaction had ended: %v %v", h.told, h.events)
						}
						return err
					})
				}))
				require.Equal(t, []ratelimit.Refusal{want}, h.told)
				require.Len(t, h.events, 1)
				require.Equal(t, tight.Name(), h.events[0].(ratelimit.Decided).Decision.States[0].Limit.Name())
			})
		}
	}, onPostgres, inMemory)
}

// An attempt that lost a conflict or its connection reports nothing: it is retried, or its caller got an error.
func TestRefusedIsNotCalledForRetriedAttempts(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		lost        int  // attempts
		connections bool // whether they lose their connections
		filled      bool // whether the bucket is full by the last attempt
		isAway      bool // whether no connection can be made after the first attempt
		want        error
		told        int
	}{
		"RefusedAgain":        {lost: 3, want: ratelimit.ErrLimited, told: 1},
		"AllowedInTheLast":    {lost: 2, filled: true},
		"AllOfThemLost":       {lost: 4, want: ratelimit.ErrContended},
		"ConnectedAgain":      {lost: 1, connections: true, want: ratelimit.ErrLimited, told: 1},
		"NeverConnectedAgain": {lost: 1, connections: true, isAway: true, want: errUndone},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var isAway atomic.Bool
			s := newStand(t, func(c *pgxpool.Config) {
				c.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) {
					if isAway.Load() {
						return false, errUndone
					}
					return true, nil
				}
			})
			limiter, h := s.hooked(t, ratelimit.Config{MaxAttempts: 4})
			empty, lose := tight.For("key"), "UPDATE public.messages SET key = key || '!'"
			takeAll(t, limiter, empty)
			s.outside.exec(t, "INSERT INTO public.messages (key) VALUES ('contested')")
			attempts := 0
			err := limiter.InTx(t.Context(), func(tx pgx.Tx) error {
				attempts++
				if test.filled && attempts > test.lost {
					require.NoError(t, limiter.WithTx(tx).Reset(t.Context(), empty))
				}
				err := limiter.WithTx(tx).Require(t.Context(), empty)
				if attempts > test.lost || !errors.Is(err, ratelimit.ErrLimited) {
					return err
				}
				if test.connections {
					isAway.Store(test.isAway)
					return errOf(tx.Exec(t.Context(), "SELECT pg_terminate_backend(pg_backend_pid())"))
				}
				s.outside.exec(t, lose)
				return errOf(tx.Exec(t.Context(), lose))
			})
			require.ErrorIs(t, err, test.want)
			if !test.isAway {
				require.Equal(t, min(test.lost+1, 4), attempts)
			}
			require.Len(t, h.told, test.told)
			require.Len(t, h.events, test.told)
			isAway.Store(false)
		})
	}
}
