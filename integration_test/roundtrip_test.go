package integration_test

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/roundtrips"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// wire counts round trips.
type wire struct{ roundtrips.Counter }

// count returns the round trips that call makes.
func (w *wire) count(call func()) int { return w.Of(call) }

// onEach is for a pool's configuration: it counts on each connection.
func (w *wire) onEach(c *pgxpool.Config) { c.ConnConfig.DialFunc = w.Dial }

// on is for a pool's configuration.
func (w *wire) on(c *pgxpool.Config) {
	c.MaxConns = 1 // so that the test warms up the connection that it counts
	c.ConnConfig.DialFunc = w.Dial
	c.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false } // of a connection idle for a second
}

// setupCounted is setup with one connection, whose round trips are counted, and a Limiter without batches. A call in a batch may take
// another number: it depends on who calls meanwhile.
func setupCounted(t *testing.T) (*bundle, *wire) {
	t.Helper()
	w := &wire{}
	b := setup(t, w.on)
	b.spend(t)
	b.limiter = b.unbatched(t)
	return b, w
}

// unbatched returns another Limiter on the same rows, which has not been used and makes no batches.
func (b *bundle) unbatched(t *testing.T) *ratelimit.Limiter {
	t.Helper()
	return b.with(t, ratelimit.Config{NoBatching: true})
}

// countedOn is setupCounted on a database that is there, with a pool that the goroutines of a synctest bubble serve.
func countedOn(t *testing.T, url string, w *wire) *bundle {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	w.on(config)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	b := &bundle{pool: pool, schema: "ratelimit"}
	b.limiter = b.with(t, ratelimit.Config{})
	b.spend(t)
	return b
}

// spend empties the buckets that are called so.
func (b *bundle) spend(t *testing.T) {
	t.Helper()
	takeAll(t, b.limiter, tight.For("empty"))
	takeAll(t, b.limiter, wide.For("empty"))
}

func TestDecisionsTakeOneRoundTrip(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "the general path takes more round trips")
	five := []ratelimit.Request{roomy.For("e"), roomy.For("a"), other.For("x"), other.Global(), roomy.For("c")}
	b, w := setupCounted(t)
	tests := []struct {
		name             string
		call             verb
		allowed          bool
		standalone, inTx int // round trips
	}{
		{"TakeFromOneLimit", taking(roomy.For("a")), true, 1, 1},
		{"TakeFromFiveLimits", taking(five...), true, 1, 1},
		{"ReserveFromOneLimit", reserving(roomy.For("a")), true, 2, 2}, // begin and take, record and commit
		{"ReserveFromFiveLimits", reserving(five...), true, 2, 2},
		{"RefusalByOneLimit", taking(tight.For("empty")), false, 1, 1},
		{"RefusalByOneOfSix", taking(append(five, tight.For("empty"))...), false, 1, 2}, // and the savepoint undone
		{"TakeFromAShardedLimit", taking(wide.For("a")), true, 1, 1},
		{"TakeFromAShardedLimitAndFive", taking(append(five, wide.For("a"))...), true, 1, 1},
		{"TakeFromAllItsRows", taking(wide.For("a").Cost(2e5)), true, 3, 2}, // look, begin and lock, save and commit
		{"RefusalByAShardedLimit", taking(wide.For("empty")), false, 2, 4},  // and a look; in a transaction all rows are locked, and that is undone
		{"RefusalByAShardedLimitOfSix", taking(append(five, wide.For("empty"))...), false, 2, 4},
		{"RefusalByAllItsRows", taking(wide.For("empty").Cost(2e5)), false, 1, 2},
		{"ReserveFromAShardedLimit", reserving(wide.For("a")), true, 2, 2},
		{"CheckAShardedLimit", checking(wide.For("a")), true, 1, 1},
		{"ValueOfAShardedLimit", valuing(wide.For("a")), true, 1, 1},
		{"ResetAShardedLimit", resetting(wide.For("a")), true, 2, 2},
		{"TakeUpTo", takingUpTo(3, five...), true, 2, 2},                           // begin and lock, save and commit
		{"TakeUpToOfNothingThere", takingUpTo(3, tight.For("empty")), false, 2, 2}, // nothing to save
		{"Borrow", taking(ratelimit.Borrow(roomy.For("own"), other.For("pool"))), true, 2, 2},
		{"CheckABorrow", checking(ratelimit.Borrow(roomy.For("own"), other.For("pool"))), true, 1, 1},
		{"CheckReserve", checkingReserve(five...), true, 1, 1},
		{"TakeOfNothing", taking(roomy.For("a").Cost(0)), true, 1, 1},
		{"Check", checking(five...), true, 1, 1},
		{"Value", valuing(roomy.For("a")), true, 1, 1},
		{"Reset", resetting(five...), true, 2, 2},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) { // not parallel: they share the connection
			trips := func(limiter *ratelimit.Limiter) int {
				return w.count(func() {
					allowed, err := test.call(t.Context(), limiter)
					require.NoError(t, err)
					require.Equal(t, test.allowed, allowed)
				})
			}
			trips(b.limiter) // to prepare the statement
			standalone := trips(b.limiter)
			tx := b.begin(t, pgx.ReadCommitted)
			trips(b.limiter.WithTx(tx))
			require.Equal(t, []int{test.standalone, test.inTx}, []int{standalone, trips(b.limiter.WithTx(tx))})
			require.NoError(t, tx.Commit(t.Context()))
		})
	}
	t.Run("ATransactionIsThree", func(t *testing.T) { // not parallel: begin, take, commit
		require.Equal(t, 3, w.count(func() {
			require.NoError(t, b.limiter.InTx(t.Context(), func(tx pgx.Tx) error {
				return takeAndCheck(t.Context(), b.limiter.WithTx(tx), five)
			}))
		}))
	})
}

// A call without concurrent calls is a batch by itself, and takes as many round trips as without batches.
func TestALoneCallInABatchTakesOneRoundTrip(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "the general path takes more round trips")
	url := postgrestest.NewDatabase(t)
	synctest.Test(t, func(t *testing.T) {
		w := &wire{}
		b := countedOn(t, url, w)
		for _, call := range []verb{taking(roomy.For("a")), taking(roomy.For("a"), other.Global())} {
			requireAllowed(t, call, b.limiter) // prepares the statement
			for range 20 {
				synctest.Wait() // the goroutine of the batch before has ended
				require.Equal(t, 1, w.count(func() { requireAllowed(t, call, b.limiter) }))
			}
		}
	})
}

// Calls on a reservation, and changes of buckets, take these round trips.
func TestOtherVerbsTakeFewRoundTrips(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "the general path takes more round trips")
	b, w := setupCounted(t)
	type call func(ctx context.Context, limiter *ratelimit.Limiter, id string) error
	several := []ratelimit.Request{roomy.For("a"), roomy.For("b"), roomy.For("c")}
	for _, test := range []struct {
		name             string
		reserved         []ratelimit.Request
		call             call
		standalone, inTx int
	}{
		{"Settle", several[:1], func(ctx context.Context, l *ratelimit.Limiter, id string) error { return l.Settle(ctx, id) }, 2, 2}, // begin and lock, save and commit
		{"SettleWithASurplus", several[:1], func(ctx context.Context, l *ratelimit.Limiter, id string) error {
			return l.Settle(ctx, id, several[0].Cost(0.5))
		}, 3, 4},
		{"SettleOfThree", several, func(ctx context.Context, l *ratelimit.Limiter, id string) error {
			return l.Settle(ctx, id, several[0].Cost(0.5), several[1].Cost(2))
		}, 3, 4},
		{"Cancel", several[:1], func(ctx context.Context, l *ratelimit.Limiter, id string) error { return l.Cancel(ctx, id) }, 3, 4},
		{"Renew", several[:1], func(ctx context.Context, l *ratelimit.Limiter, id string) error { return errOf(l.Renew(ctx, id)) }, 3, 3},
		{"Start", several[:1], func(ctx context.Context, l *ratelimit.Limiter, id string) error { return errOf(l.Start(ctx, id)) }, 2, 2},
		{"Started", several[:1], func(ctx context.Context, l *ratelimit.Limiter, id string) error {
			_, err := l.Started(ctx, id)
			return err
		}, 2, 1},
		{"Charge", several[:1], func(ctx context.Context, l *ratelimit.Limiter, _ string) error { return l.Charge(ctx, several[0]) }, 2, 2},
		{"ChargeThree", several[:1], func(ctx context.Context, l *ratelimit.Limiter, _ string) error { return l.Charge(ctx, several...) }, 2, 2},
		{"Credit", several[:1], func(ctx context.Context, l *ratelimit.Limiter, _ string) error { return l.Credit(ctx, several[0]) }, 2, 2},
		{"CreditThree", several[:1], func(ctx context.Context, l *ratelimit.Limiter, _ string) error { return l.Credit(ctx, several...) }, 2, 2},
	} {
		t.Run(test.name, func(t *testing.T) { // not parallel: they share the connection
			trips := func(limiter *ratelimit.Limiter) int {
				r, err := limiter.Reserve(t.Context(), test.reserved...)
				require.NoError(t, err)
				return w.count(func() { require.NoError(t, test.call(t.Context(), limiter, r.ID)) })
			}
			trips(b.limiter) // to prepare the statements
			standalone := trips(b.limiter)
			tx := b.begin(t, pgx.ReadCommitted)
			trips(b.limiter.WithTx(tx))
			require.Equal(t, []int{test.standalone, test.inTx}, []int{standalone, trips(b.limiter.WithTx(tx))})
			require.NoError(t, tx.Commit(t.Context()))
		})
	}
}

func TestLeasesTakeFewRoundTrips(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "the general path takes more round trips")
	b, w := setupCounted(t)
	one, two := daylong("one", 1).For("ada"), daylong("two", 1).For("ada")
	type trips struct{ acquire, refuse, renew, release, lost int }
	count := func(l *ratelimit.Limiter, requests ...ratelimit.Request) (n trips) {
		var lease ratelimit.Lease
		n.acquire = w.count(func() { lease = acquire(t, l, requests...) })
		n.refuse = w.count(func() { refused(t, l, requests...) })
		n.renew = w.count(func() {
			_, err := l.RenewLease(t.Context(), lease.ID)
			require.NoError(t, err)
		})
		n.release = w.count(func() { require.NoError(t, l.Release(t.Context(), lease.ID)) })
		n.lost = w.count(func() { require.ErrorIs(t, l.Release(t.Context(), lease.ID), ratelimit.ErrLeaseLost) })
		return n
	}
	for _, test := range []struct {
		name             string
		requests         []ratelimit.Request
		standalone, inTx trips
	}{
		{"OneLimit", []ratelimit.Request{one}, trips{2, 2, 2, 2, 2}, trips{2, 2, 2, 2, 1}}, // begin and lock, save and commit
		{"TwoLimits", []ratelimit.Request{one, two}, trips{2, 2, 2, 2, 2}, trips{2, 2, 2, 2, 1}},
		{"WithTokens", []ratelimit.Request{one, roomy.For("ada")}, trips{2, 2, 2, 2, 2}, trips{2, 2, 2, 2, 1}},
	} {
		t.Run(test.name, func(t *testing.T) { // not parallel: they share the connection
			count(b.limiter, test.requests...) // to prepare the statements
			require.Equal(t, test.standalone, count(b.limiter, test.requests...))
			tx := b.begin(t, pgx.ReadCommitted)
			count(b.limiter.WithTx(tx), test.requests...)
			require.Equal(t, test.inTx, count(b.limiter.WithTx(tx), test.requests...))
			require.NoError(t, tx.Commit(t.Context()))
		})
	}
}

// What a Limiter has to know before its first call, of the secret, of poolers and of Citus, it asks in one round trip.
func TestFirstCallsTakeOneRoundTripMore(t *testing.T) {
	t.Parallel()
	b, w := setupCounted(t)
	take := func(l *ratelimit.Limiter) error { _, err := l.Take(t.Context(), roomy.For("a")); return err }
	for name, call := range map[string]func(l *ratelimit.Limiter) error{
		"Take":   take,
		"Check":  func(l *ratelimit.Limiter) error { _, err := l.Check(t.Context(), roomy.For("a")); return err },
		"Expire": func(l *ratelimit.Limiter) error { _, err := l.Expire(t.Context()); return err },
		"Prune":  func(l *ratelimit.Limiter) error { _, err := l.Prune(t.Context(), roomy); return err },
		"InTx": func(l *ratelimit.Limiter) error {
			return l.InTx(t.Context(), func(tx pgx.Tx) error { return take(l.WithTx(tx)) })
		},
	} {
		t.Run(name, func(t *testing.T) { // not parallel: they share the connection
			trips := func(l *ratelimit.Limiter) int { return w.count(func() { require.NoError(t, call(l)) }) }
			trips(b.limiter) // to prepare the statements
			fresh := b.unbatched(t)
			first := trips(fresh)
			require.Equal(t, trips(fresh)+1, first)
		})
	}
	t.Run("WithTx", func(t *testing.T) {
		tx, fresh := b.begin(t, pgx.ReadCommitted), b.unbatched(t)
		trips := func() int { return w.count(func() { require.NoError(t, take(fresh.WithTx(tx))) }) }
		first := trips()
		require.Equal(t, trips()+1, first)
		require.NoError(t, tx.Commit(t.Context()))
	})
}
