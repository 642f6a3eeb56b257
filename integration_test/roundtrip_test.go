package integration_test

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// wire counts round trips.
type wire struct{ testkit.RoundTrips }

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

// setupCounted is setup with one connection, whose round trips are counted, and a Limiter without batches. A call in a
// batch may take another number: it depends on who calls meanwhile.
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
	b := open(t, url, w.on)
	b.spend(t)
	return b
}

// spend empties the buckets that are called so.
func (b *bundle) spend(t *testing.T) {
	t.Helper()
	takeAll(t, b.limiter, tight.For("empty"))
	takeAll(t, b.limiter, wide.For("empty"))
}

// Each call takes these round trips on the only connection, which has prepared its statements. Behind begin and lock
// come save and commit.
func TestCallsTakeFewRoundTrips(t *testing.T) {
	t.Parallel()
	five := []ratelimit.Request{roomy.For("e"), roomy.For("a"), other.For("x"), other.Global(), roomy.For("c")}
	three := []ratelimit.Request{roomy.For("a"), roomy.For("b"), roomy.For("c")}
	type prepare func(ctx context.Context, l *ratelimit.Limiter) (id string, err error)
	reserved := func(requests ...ratelimit.Request) prepare {
		return func(ctx context.Context, l *ratelimit.Limiter) (string, error) {
			r, err := l.Reserve(ctx, requests...)
			return r.ID, err
		}
	}
	b, w := setupCounted(t)
	var id string // of the reservation of the row
	byName := func(name string) verb {
		return func(ctx context.Context, l *ratelimit.Limiter) (bool, error) {
			return true, everyCall[name](ctx, l, id, three[0])
		}
	}
	settling := func(requests ...ratelimit.Request) verb {
		return func(ctx context.Context, l *ratelimit.Limiter) (bool, error) {
			return true, l.Settle(ctx, id, requests...)
		}
	}
	for _, test := range []struct {
		name             string
		prepare          prepare
		call             verb
		refused          bool
		standalone, inTx int
	}{
		{"TakeFromOneLimit", nil, taking(roomy.For("a")), false, 1, 1},
		{"TakeFromFiveLimits", nil, taking(five...), false, 1, 1},
		{"ReserveFromFiveLimits", nil, reserving(five...), false, 1, 1},
		{"RefusalByOneLimit", nil, taking(tight.For("empty")), true, 1, 1},
		{"RefusalByOneOfSix", nil, taking(append(five, tight.For("empty"))...), true, 1, 1},
		{"TakeFromAShardedLimit", nil, taking(wide.For("a")), false, 1, 1},
		{"TakeFromAShardedLimitAndFive", nil, taking(append(five, wide.For("a"))...), false, 1, 1},
		{"TakeFromAllItsRows", nil, taking(wide.For("a").Cost(2e5)), false, 1, 1},
		{"RefusalByAShardedLimit", nil, taking(wide.For("empty")), true, 2, 2}, // and a look
		{"RefusalByAllItsRows", nil, taking(wide.For("empty").Cost(2e5)), true, 1, 1},
		{"ReserveFromAShardedLimit", nil, reserving(wide.For("a")), false, 1, 1},
		{"CheckAShardedLimit", nil, checking(wide.For("a")), false, 1, 1},
		{"ValueOfAShardedLimit", nil, valuing(wide.For("a")), false, 1, 1},
		{"ResetAShardedLimit", nil, resetting(wide.For("a")), false, 1, 1},
		{"CheckReserve", nil, checkingReserve(five...), false, 1, 1},
		{"UpTo", nil, takingUpTo(3, five...), false, 1, 1},
		{"Borrow", nil, borrowing(roomy.For("own"), other.For("pool")), false, 3, 2}, // begin with take, charge, commit
		{"Check", nil, checking(five...), false, 1, 1},
		{"Value", nil, valuing(roomy.For("a")), false, 1, 1},
		{"Reset", nil, resetting(five...), false, 1, 1},
		{"Reserve", nil, reserving(three[0]), false, 1, 1},
		{"Settle", reserved(three[0]), settling(), false, 1, 1},
		{"SettleWithASurplus", reserved(three[0]), settling(three[0].Cost(0.5)), false, 1, 1},
		{"SettleWithAnOverage", reserved(three[0]), settling(three[0].Cost(2)), false, 1, 1},
		{"SettleOfThree", reserved(three...), settling(three[0].Cost(0.5), three[1].Cost(2)), false, 1, 1},
		{"Cancel", reserved(three[0]), byName("Cancel"), false, 1, 1},
		{"CancelOfThree", reserved(three...), byName("Cancel"), false, 1, 1},
		{"Renew", reserved(three[0]), byName("Renew"), false, 2, 2},
		{"Start", reserved(three[0]), byName("Start"), false, 1, 1},
		{"Started", reserved(three[0]), byName("Started"), false, 1, 1},
		{"Charge", nil, byName("Charge"), false, 1, 1},
		{"Credit", nil, byName("Credit"), false, 1, 1},
	} {
		t.Run(test.name, func(t *testing.T) { // not parallel: they share the connection
			trips := func(limiter *ratelimit.Limiter) int {
				if test.prepare != nil {
					made, err := test.prepare(t.Context(), limiter)
					require.NoError(t, err)
					id = made
				}
				return w.count(func() {
					allowed, err := test.call(t.Context(), limiter)
					require.NoError(t, err)
					require.Equal(t, !test.refused, allowed)
				})
			}
			trips(b.limiter) // to prepare the statements
			standalone := trips(b.limiter)
			tx := b.begin(t, pgx.ReadCommitted)
			trips(b.limiter.WithTx(tx))
			require.Equal(t, []int{test.standalone, test.inTx}, []int{standalone, trips(b.limiter.WithTx(tx))})
			require.NoError(t, tx.Commit(t.Context()))
		})
	}
	t.Run("CancelOfAnotherProcess", func(t *testing.T) { // not parallel: the first asks which bucket it is
		r, err := b.unbatched(t).Reserve(t.Context(), three[0])
		require.NoError(t, err)
		require.Equal(t, 2, w.count(func() { require.NoError(t, b.limiter.Cancel(t.Context(), r.ID)) }))
	})
	t.Run("SettleOfAnotherProcess", func(t *testing.T) { // not parallel: the first asks whether there are several
		for _, test := range []struct {
			actual []ratelimit.Request
			trips  int
		}{{nil, 2}, {three[:1], 2}, {three[1:], 1}} {
			r, err := b.unbatched(t).Reserve(t.Context(), three...)
			require.NoError(t, err)
			require.Equal(t, test.trips, w.count(func() { require.NoError(t, b.limiter.Settle(t.Context(), r.ID, test.actual...)) }))
		}
	})
	t.Run("ATransactionIsTwo", func(t *testing.T) { // not parallel: begin with take, commit
		require.Equal(t, 2, w.count(func() {
			require.NoError(t, b.limiter.InTx(t.Context(), func(tx pgx.Tx) error {
				return b.limiter.WithTx(tx).Require(t.Context(), five...)
			}))
		}))
	})
}

// A call without concurrent calls is a batch by itself, and takes as many round trips as without batches.
func TestALoneCallInABatchTakesOneRoundTrip(t *testing.T) {
	t.Parallel()
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

func TestLeasesTakeFewRoundTrips(t *testing.T) {
	t.Parallel()
	b, w := setupCounted(t)
	one, two := daylong("one", 1).For("ada"), daylong("two", 1).For("ada")
	type trips struct{ acquire, refuse, renew, release, lost int }
	count := func(l *ratelimit.Limiter, requests ...ratelimit.Request) (n trips) {
		var lease ratelimit.Lease
		n.acquire = w.count(func() { lease = acquire(t, l, requests...) })
		n.refuse = w.count(func() { refused(t, l, requests...) })
		n.renew = w.count(func() { require.NoError(t, errOf(l.RenewLease(t.Context(), lease.ID))) })
		n.release = w.count(func() { require.NoError(t, l.Release(t.Context(), lease.ID)) })
		n.lost = w.count(func() { require.ErrorIs(t, l.Release(t.Context(), lease.ID), ratelimit.ErrLeaseLost) })
		return n
	}
	for _, test := range []struct {
		requests         []ratelimit.Request
		standalone, inTx trips
	}{
		{[]ratelimit.Request{one}, trips{1, 1, 1, 1, 1}, trips{1, 1, 1, 1, 1}},
		{[]ratelimit.Request{one, two}, trips{1, 1, 1, 1, 1}, trips{1, 1, 1, 1, 1}},
		{[]ratelimit.Request{one, roomy.For("ada")}, trips{1, 1, 1, 1, 1}, trips{1, 1, 1, 1, 1}},
	} {
		count(b.limiter, test.requests...) // to prepare the statements
		require.Equal(t, test.standalone, count(b.limiter, test.requests...), test.requests)
		for _, isolation := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.Serializable} {
			tx := b.begin(t, isolation)
			count(b.limiter.WithTx(tx), test.requests...)
			require.Equal(t, test.inTx, count(b.limiter.WithTx(tx), test.requests...), test.requests)
			require.NoError(t, tx.Commit(t.Context()))
		}
	}
}

// What a Limiter has to know before its first call, of the secret, of poolers and of Citus, it asks in one round trip.
func TestFirstCallsTakeOneRoundTripMore(t *testing.T) {
	t.Parallel()
	b, w := setupCounted(t)
	for name, call := range map[string]verb{
		"Take":  taking(roomy.For("a")),
		"Check": checking(roomy.For("a")),
		"InTx":  inTx(taking(roomy.For("a"))),
		"Expire": func(ctx context.Context, l *ratelimit.Limiter) (bool, error) {
			return true, everyCall["Expire"](ctx, l, "", roomy.For("a"))
		},
		"Prune": func(ctx context.Context, l *ratelimit.Limiter) (bool, error) {
			return true, everyCall["Prune"](ctx, l, "", roomy.For("a"))
		},
	} {
		trips := func(l *ratelimit.Limiter) int { return w.count(func() { requireAllowed(t, call, l) }) }
		trips(b.limiter) // to prepare the statements
		fresh := b.unbatched(t)
		first := trips(fresh)
		require.Equal(t, trips(fresh)+1, first, name)
	}
	tx, fresh := b.begin(t, pgx.ReadCommitted), b.unbatched(t)
	trips := func() int { return w.count(func() { takeOne(t, fresh.WithTx(tx), roomy.For("a")) }) }
	first := trips()
	require.Equal(t, trips()+1, first)
	require.NoError(t, tx.Commit(t.Context()))
}
