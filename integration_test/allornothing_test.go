package integration_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

var levels = []struct {
	name  string
	level pgx.TxIsoLevel
}{
	{"ReadCommitted", pgx.ReadCommitted},
	{"RepeatableRead", pgx.RepeatableRead},
	{"Serializable", pgx.Serializable},
}

// mixed asks for a bucket with room, one without a row, and, last in the order asked and in the middle of
// the order of locking, one that is empty.
func mixed(key string) []ratelimit.Request {
	return []ratelimit.Request{roomy.For(key), other.For(key + " without a row"), pinch.For(key).Cost(2)}
}

// setupWork is setup with a table of the application's own.
func setupWork(t *testing.T) *bundle {
	t.Helper()
	b := setup(t)
	b.exec(t, "CREATE TABLE work (key text)")
	return b
}

// makeMixed makes the rows that mixed asks for, and returns them.
func makeMixed(t *testing.T, b *bundle, key string) []row {
	t.Helper()
	require.NoError(t, b.limiter.Reset(t.Context(), roomy.For(key)))
	takeAll(t, b.limiter, pinch.For(key))
	return b.rows(t, key)
}

func TestTakeChangesNoRowWhenTheLastLimitRefuses(t *testing.T) {
	t.Parallel()
	b := setupWork(t)
	t.Run("Standalone", func(t *testing.T) {
		t.Parallel()
		key := t.Name() + " "
		before := makeMixed(t, b, key)
		requireRefused(t, b.limiter, mixed(key))
		require.Equal(t, before, b.rows(t, key))
	})
	for _, level := range levels {
		t.Run(level.name, func(t *testing.T) {
			t.Parallel()
			key := t.Name() + " "
			before := makeMixed(t, b, key)
			tx := b.begin(t, level.level)
			requireRefused(t, b.limiter.WithTx(tx), mixed(key))
			_, err := tx.Exec(t.Context(), "INSERT INTO work VALUES ($1)", key)
			require.NoError(t, err)
			require.NoError(t, tx.Commit(t.Context()))
			require.Equal(t, before, b.rows(t, key))
			requireWork(t, b, key)
		})
		t.Run(level.name+"InASavepoint", func(t *testing.T) {
			t.Parallel()
			key := t.Name() + " "
			before := makeMixed(t, b, key)
			tx := b.begin(t, level.level)
			inner, err := tx.Begin(t.Context())
			require.NoError(t, err)
			_, err = inner.Exec(t.Context(), "INSERT INTO work VALUES ($1)", key)
			require.NoError(t, err)
			requireRefused(t, b.limiter.WithTx(inner), mixed(key))
			innermost, err := inner.Begin(t.Context())
			require.NoError(t, err)
			requireRefused(t, b.limiter.WithTx(innermost), mixed(key))
			require.NoError(t, innermost.Commit(t.Context()))
			require.NoError(t, inner.Commit(t.Context()))
			require.NoError(t, tx.Commit(t.Context()))
			require.Equal(t, before, b.rows(t, key))
			requireWork(t, b, key)
		})
	}
}

// requireWork checks that the work for key was committed once.
func requireWork(t *testing.T, b *bundle, key string) {
	t.Helper()
	var done int
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT count(*) FROM work WHERE key = $1", key).Scan(&done))
	require.Equal(t, 1, done)
}

func requireRefused(t *testing.T, limiter *ratelimit.Limiter, requests []ratelimit.Request) {
	t.Helper()
	d, err := limiter.Take(t.Context(), requests...)
	require.NoError(t, err)
	require.False(t, d.Allowed)
	require.Positive(t, d.RetryAfter)
	for i, s := range d.States {
		refused := i == len(d.States)-1
		require.Equal(t, refused, !s.Allowed, "%s", s.Limit)
		if refused {
			require.Equal(t, d.RetryAfter, s.RetryAfter)
		} else {
			require.Zero(t, s.RetryAfter)
			require.InDelta(t, s.Limit.Capacity(), s.Remaining, 1e-3, "nothing was taken from %s", s.Limit)
		}
	}
}

// A refused call over several limits lets the others go on at once, not at the end of the transaction.
func TestRefusedTakeOverSeveralLimitsHoldsNoRow(t *testing.T) {
	t.Parallel()
	b := setupWork(t)
	makeMixed(t, b, "key")
	tx := b.begin(t, pgx.ReadCommitted)
	requireRefused(t, b.limiter.WithTx(tx), mixed("key"))
	err := pgx.BeginFunc(t.Context(), b.pool, func(elsewhere pgx.Tx) error {
		_, err := elsewhere.Exec(t.Context(), "SET LOCAL lock_timeout = '5s'")
		require.NoError(t, err)
		requireAllowed(t, taking(roomy.For("key"), other.For("key without a row")), b.limiter.WithTx(elsewhere))
		requireAllowed(t, resetting(pinch.For("key")), b.limiter.WithTx(elsewhere))
		return nil
	})
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
}

// So does a refused reservation over several limits.
func TestRefusedReserveOverSeveralLimitsHoldsNoRow(t *testing.T) {
	t.Parallel()
	b := setup(t)
	requireAllowed(t, taking(roomy.For("key")), b.limiter)
	requireAllowed(t, reserving(bounded.For("key").Cost(2)), b.limiter)
	tx := b.begin(t, pgx.ReadCommitted)
	r, err := b.limiter.WithTx(tx).Reserve(t.Context(), bounded.For("key"), roomy.For("key"))
	require.NoError(t, err)
	require.False(t, r.Allowed)
	err = pgx.BeginFunc(t.Context(), b.pool, func(elsewhere pgx.Tx) error {
		_, err := elsewhere.Exec(t.Context(), "SET LOCAL lock_timeout = '5s'")
		require.NoError(t, err)
		requireAllowed(t, taking(roomy.For("key")), b.limiter.WithTx(elsewhere))
		requireAllowed(t, resetting(bounded.For("key")), b.limiter.WithTx(elsewhere))
		return nil
	})
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
}

// A row that is made to be locked is marked by an empty array of leases. Should the mark have stayed in a row, the row holds what
// it holds: it is not taken for one that was made just now, and is full.
func TestARowThatKeptTheMarkOfItsMakingHoldsWhatItHolds(t *testing.T) {
	t.Parallel()
	b := setup(t)
	reserved, err := b.limiter.Reserve(t.Context(), roomy.For("key").Cost(10))
	require.NoError(t, err)
	requireAllowed(t, taking(roomy.For("key").Cost(20)), b.limiter)
	b.exec(t, `UPDATE ratelimit.buckets SET leases = '{}'`)
	err = pgx.BeginFunc(t.Context(), b.pool, func(tx pgx.Tx) error {
		return b.limiter.WithTx(tx).Cancel(t.Context(), reserved.ID)
	})
	require.NoError(t, err)
	require.InDelta(t, roomy.Capacity()-20, b.held(t, "roomy", "key"), 1e-3)
}

// A savepoint of the caller's gives back what was taken in it, and only that.
func TestRollbackToASavepointGivesBackWhatWasTakenInIt(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, level := range levels {
		t.Run(level.name, func(t *testing.T) {
			t.Parallel()
			key := t.Name()
			take := func(tx pgx.Tx, cost float64) {
				requireAllowed(t, taking(roomy.For(key).Cost(cost), other.For(key).Cost(cost)), b.limiter.WithTx(tx))
			}
			tx := b.begin(t, level.level)
			take(tx, 1)
			inner, err := tx.Begin(t.Context())
			require.NoError(t, err)
			take(inner, 10)
			take(inner, 100)
			require.NoError(t, inner.Rollback(t.Context()))
			take(tx, 1000)
			require.NoError(t, tx.Commit(t.Context()))
			for _, limit := range []ratelimit.Limit{roomy, other} {
				require.InDelta(t, limit.Capacity()-1001, b.row(t, limit.Name(), key).Value, 0.1)
			}
		})
	}
}

func TestRollbackLeavesEveryRowAsItWas(t *testing.T) {
	t.Parallel()
	onEach(t, testRollbackLeavesEveryRowAsItWas, onPostgres, inMemory)
}

func testRollbackLeavesEveryRowAsItWas(t *testing.T, on backend) {
	b := on.setup(t)
	changes := []struct {
		name string
		make func(key string) verb
	}{
		{"Take", func(key string) verb { return taking(roomy.For(key)) }},
		{"TakeSeveral", func(key string) verb { return taking(roomy.For(key), other.For(key+"new")) }},
		{"Reserve", func(key string) verb { return reserving(pinch.For(key).Cost(0.5)) }},
		{"Reset", func(key string) verb { return resetting(pinch.For(key), other.For(key+"new")) }},
	}
	for _, change := range changes {
		for _, level := range levels {
			t.Run(change.name+"/"+level.name, func(t *testing.T) {
				t.Parallel()
				key := t.Name() + " "
				before := makeMixed(t, b, key)
				tx := b.begin(t, level.level)
				requireAllowed(t, change.make(key), b.limiter.WithTx(tx))
				require.NoError(t, tx.Rollback(t.Context()))
				require.Equal(t, before, b.rows(t, key))
			})
		}
		t.Run(change.name+"/InTx", func(t *testing.T) {
			t.Parallel()
			key := t.Name() + " "
			before := makeMixed(t, b, key)
			changedMind := errors.New("changed my mind")
			err := b.limiter.InTx(t.Context(), func(tx pgx.Tx) error {
				requireAllowed(t, change.make(key), b.limiter.WithTx(tx))
				return changedMind
			})
			require.ErrorIs(t, err, changedMind)
			require.Equal(t, before, b.rows(t, key))
		})
	}
}

func requireAllowed(t *testing.T, call verb, limiter *ratelimit.Limiter) {
	t.Helper()
	allowed, err := call(t.Context(), limiter)
	require.NoError(t, err)
	require.True(t, allowed)
}

// A flood of reservations that are given up must not leave a debt, nor forgive one.
func TestReservationsRolledBackEndWhereTheyBegan(t *testing.T) {
	t.Parallel()
	flood := testsize.Of(100, 1000)
	b := setup(t)
	takeAll(t, b.limiter, bounded.For("key"))
	before := b.rows(t, "")
	requests := []ratelimit.Request{bounded.For("key").Cost(0.25), roomy.For("key")}
	require.NoError(t, atonce.Do(4, func(worker int) error {
		for n := range flood / 4 {
			tx, err := b.pool.Begin(t.Context())
			if err != nil {
				return err
			}
			r, err := b.limiter.WithTx(tx).Reserve(t.Context(), requests[:1+n%2]...)
			if err != nil || !r.Allowed {
				return errors.Join(err, r.Err(), fmt.Errorf("worker %d", worker))
			}
			if err := tx.Rollback(t.Context()); err != nil {
				return err
			}
		}
		return nil
	}))
	require.Equal(t, before, b.rows(t, ""))
}

// One bucket named twice is one row, which one statement cannot update twice: the costs add up first.
func TestTakeAddsUpWhatACallAsksOfOneBucket(t *testing.T) {
	t.Parallel()
	five := ratelimit.Define("five", hoard(5))
	b := setup(t)
	for _, c := range callers() {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			key := t.Name() + " "
			take := func(requests ...ratelimit.Request) ratelimit.Decision {
				d, err := c.take(t.Context(), b.db(), b.limiter, requests...)
				require.NoError(t, err)
				require.Len(t, d.States, len(requests))
				return d
			}
			require.True(t, take(five.For(key).Cost(2), roomy.For(key), five.For(key), five.For(key+"another")).Allowed)
			require.InDelta(t, 2, b.row(t, "five", key).Value, 1e-3)
			require.InDelta(t, 4, b.row(t, "five", key+"another").Value, 1e-3)

			before := b.rows(t, key)
			require.False(t, take(five.For(key).Cost(2), roomy.For(key), five.For(key).Cost(2)).Allowed, "each alone would fit, but not both")
			require.Equal(t, before, b.rows(t, key))
		})
	}
}
