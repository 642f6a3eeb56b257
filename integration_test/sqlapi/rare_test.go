package sqlapi_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
)

// one row of a query, or the test fails.
func got[T any](t *testing.T, pool *pgxpool.Pool, query string, args ...any) T {
	t.Helper()
	rows, err := pool.Query(t.Context(), query, args...)
	require.NoError(t, err, query)
	value, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	require.NoError(t, err, query)
	return value
}

// remove deletes a rule by hand.
func remove(t *testing.T, pool *pgxpool.Pool, name string) {
	t.Helper()
	_, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.rules (version, of, name, author, reason)
		SELECT max(version) + 1, 'rule', $1, 'ana', 'x' FROM ratelimit.rules`, name)
	require.NoError(t, err)
}

// TestAReservationOutlivesItsRule promises that what was reserved is settled or given back under the policy of then, if
// the limit has no rule any more.
func TestAReservationOutlivesItsRule(t *testing.T) {
	t.Parallel()
	for name, says := range map[string]string{
		"bucket":   `{"rate": 100, "period": "36525d", "max_reserved": 10}`,
		"window":   `{"kind": "fixed window", "rate": 100, "period": "36525d", "max_reserved": 10}`,
		"calendar": `{"kind": "calendar window", "rate": 100, "resets": "year", "max_reserved": 10}`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := postgrestest.New(t)
			store(t, pool, map[string]string{name: says})
			var ids []string
			for range 3 {
				ids = append(ids, got[string](t, pool, `SELECT id::text FROM ratelimit.reserve($1, 'ana', 10)`, name))
			}
			remove(t, pool, name)
			require.True(t, got[bool](t, pool, `SELECT ratelimit.cancel($1)`, ids[0]))
			require.True(t, got[bool](t, pool, `SELECT ratelimit.settle($1, 4)`, ids[1]))
			require.True(t, got[bool](t, pool, `SELECT ratelimit.settle($1, 60)`, ids[2]))
			require.InDelta(t, 100-4-60, got[float64](t, pool, `SELECT value FROM ratelimit.buckets`), 1e-3)
		})
	}
	t.Run("OfAChangedRule", func(t *testing.T) {
		t.Parallel()
		pool := postgrestest.New(t)
		says := `{"kind": "fixed window", "rate": 100, "period": "36525d", "max_reserved": 10}`
		store(t, pool, map[string]string{"window": says})
		id := got[string](t, pool, `SELECT id::text FROM ratelimit.reserve('window', 'ana', 10)`)
		store(t, pool, map[string]string{"window": `{"kind": "fixed window", "rate": 200, "period": "36525d", "max_reserved": 10}`})
		require.True(t, got[bool](t, pool, `SELECT allowed FROM ratelimit.take('window', 'ana')`))
		remove(t, pool, "window")
		require.True(t, got[bool](t, pool, `SELECT ratelimit.settle($1, 60)`, id))
		require.InDelta(t, 61, got[float64](t, pool, `SELECT capacity - value FROM ratelimit.buckets`), 1e-3)
	})
	t.Run("ALease", func(t *testing.T) {
		t.Parallel()
		pool := postgrestest.New(t)
		store(t, pool, everyKind)
		fence := got[int64](t, pool, `SELECT fence FROM ratelimit.acquire('slots', 'ana', 2)`)
		remove(t, pool, "slots")
		require.True(t, got[bool](t, pool, `SELECT ratelimit.release('slots', 'ana', $1)`, fence))
		require.InDelta(t, 3, got[float64](t, pool, `SELECT value FROM ratelimit.buckets`), 0)
	})
}

// TestSettlementsAreAsSmallAsTheyAre promises that a difference may be smaller than any cost.
func TestSettlementsAreAsSmallAsTheyAre(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	store(t, pool, map[string]string{"window": `{"kind": "fixed window", "rate": 100, "period": "36525d"}`})
	id := got[string](t, pool, `SELECT id::text FROM ratelimit.reserve('window', 'ana', 0.3)`)
	store(t, pool, map[string]string{"window": `{"kind": "fixed window", "rate": 200, "period": "36525d"}`})
	require.True(t, got[bool](t, pool, `SELECT ratelimit.settle($1, 0.1::float8 + 0.2::float8)`, id))
}

// TestALeaseOfAWrongClock promises that a lease is renewed and released on a row that a wrong clock has written.
func TestALeaseOfAWrongClock(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	store(t, pool, map[string]string{"slots": `{"kind": "concurrency", "slots": 1, "lease": "10m"}`})
	ahead := func() {
		_, err := pool.Exec(t.Context(), `WITH until AS (UPDATE ratelimit.leases SET until_us = until_us + 120000000 RETURNING until_us)
			UPDATE ratelimit.buckets SET ts = ts + 120000000, leased = ARRAY[leased[1], until_us, until_us] FROM until`)
		require.NoError(t, err)
	}
	fence := got[int64](t, pool, `SELECT fence FROM ratelimit.acquire('slots', 'ana')`)
	ahead()
	require.True(t, got[bool](t, pool, `SELECT ratelimit.renew_lease('slots', 'ana', $1) BETWEEN now() + interval '9 minutes' AND now() + interval '11 minutes'`, fence))
	ahead()
	require.True(t, got[bool](t, pool, `SELECT ratelimit.release('slots', 'ana', $1)`, fence))
	require.InDelta(t, 1, got[float64](t, pool, `SELECT value FROM ratelimit.buckets`), 0)
}

// TestCheckOnlyReads promises that check works in a READ ONLY transaction: before the first call of all, beside takes,
// and on a row that a wrong clock has written.
func TestCheckOnlyReads(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	store(t, pool, map[string]string{"bucket": everyKind["bucket"], "sliding": everyKind["sliding"]})
	check := func(name string) bool {
		var allowed bool
		require.NoError(t, pgx.BeginTxFunc(t.Context(), pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
			return tx.QueryRow(t.Context(), `SELECT allowed FROM ratelimit.check($1, 'ana')`, name).Scan(&allowed)
		}))
		return allowed
	}
	for _, name := range []string{"bucket", "sliding"} {
		require.True(t, check(name))
	}
	for _, name := range []string{"bucket", "sliding"} {
		require.True(t, got[bool](t, pool, `SELECT allowed FROM ratelimit.take($1, 'ana', 3)`, name))
		require.False(t, check(name))
	}
	_, err := pool.Exec(t.Context(), `UPDATE ratelimit.buckets SET ts = ts + 120000000`)
	require.NoError(t, err)
	require.False(t, check("bucket"))

	stop, ended := make(chan struct{}), make(chan error)
	go func() {
		for {
			select {
			case <-stop:
				ended <- nil
				return
			default:
			}
			if _, err := pool.Exec(t.Context(), `SELECT ratelimit.charge('bucket', 'ana', 1)`); err != nil {
				ended <- err
				return
			}
		}
	}()
	for range 100 {
		check("bucket")
	}
	close(stop)
	require.NoError(t, <-ended)
}

// TestSettlementsOfOthersDoNotConflict promises that SERIALIZABLE transactions that end and make reservations of their
// own don't fail each other.
func TestSettlementsOfOthersDoNotConflict(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	store(t, pool, map[string]string{"bucket": everyKind["bucket"]})
	begin := func() pgx.Tx {
		tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.Serializable})
		require.NoError(t, err)
		return tx
	}
	keys, txs := []string{"ana", "bob"}, []pgx.Tx{begin(), begin()}
	for i, key := range keys {
		keys[i] = got[string](t, pool, `SELECT id::text FROM ratelimit.reserve('bucket', $1)`, key)
	}
	for i, tx := range txs {
		_, err := tx.Exec(t.Context(), `SELECT ratelimit.settle($1, 1)`, keys[i])
		require.NoError(t, err)
	}
	for i, tx := range txs {
		_, err := tx.Exec(t.Context(), `SELECT * FROM ratelimit.reserve('bucket', $1)`, []string{"eve", "kim"}[i])
		require.NoError(t, err)
	}
	for _, tx := range txs {
		require.NoError(t, tx.Commit(t.Context()))
	}
}
