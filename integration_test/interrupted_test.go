package integration_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// hangingUp is a transaction whose caller's context ends after so many of its requests.
type hangingUp struct {
	pgx.Tx
	after  int
	hangUp context.CancelFunc
}

func (tx *hangingUp) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	return hangingUpResults{BatchResults: tx.Tx.SendBatch(ctx, batch), tx: tx}
}

type hangingUpResults struct {
	pgx.BatchResults
	tx *hangingUp
}

func (r hangingUpResults) Close() error {
	err := r.BatchResults.Close()
	if r.tx.after--; r.tx.after == 0 {
		r.tx.hangUp()
	}
	return err
}

// A context that ends between two statements of a call must not leave half of it in a transaction whose
// owner commits all the same.
func TestACallThatIsInterruptedLeavesNoHalf(t *testing.T) {
	t.Parallel()
	tight := ratelimit.Define("tight", hoard(1))
	for name, call := range map[string]func(ctx context.Context, limiter *ratelimit.Limiter, id string) error{
		"RefusedTake": func(ctx context.Context, limiter *ratelimit.Limiter, _ string) error {
			d, err := limiter.Take(ctx, roomy.For("a").Cost(4), tight.For("empty"))
			if err == nil && d.Allowed {
				return fmt.Errorf("allowed")
			}
			return err
		},
		"Reserve": func(ctx context.Context, limiter *ratelimit.Limiter, _ string) error {
			_, err := limiter.Reserve(ctx, roomy.For("a"), roomy.For("b"))
			return err
		},
		"Cancel": func(ctx context.Context, limiter *ratelimit.Limiter, id string) error { return limiter.Cancel(ctx, id) },
		"Unknown": func(ctx context.Context, limiter *ratelimit.Limiter, _ string) error {
			return limiter.Cancel(ctx, unknownID)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			takeAll(t, b.limiter, tight.For("empty"))
			r, err := b.limiter.Reserve(t.Context(), roomy.For("reserved").Cost(5))
			require.NoError(t, err)
			before := b.rows(t, "")

			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			begun, err := b.pool.Begin(t.Context())
			require.NoError(t, err)
			_ = call(ctx, b.limiter.WithTx(&hangingUp{Tx: begun, after: 1, hangUp: cancel}), r.ID)
			require.Error(t, ctx.Err(), "the call has to be interrupted")
			_ = begun.Commit(t.Context())

			require.Equal(t, before, b.rows(t, ""))
			var open int
			require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT count(*) FROM ratelimit.reservations WHERE state = 'open'`).Scan(&open))
			require.Equal(t, 1, open)
		})
	}
}

const unknownID = "00000000-0000-4000-8000-000000000000"

// BEGIN on a connection that is in a transaction is only warned of, and COMMIT then ends that one.
func TestAConnectionInATransactionIsNotEndedByTheLimiter(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(t, `CREATE TABLE work (n int)`)
	conn, err := pgx.ConnectConfig(t.Context(), b.pool.Config().ConnConfig)
	require.NoError(t, err)
	defer conn.Close(context.WithoutCancel(t.Context()))
	pooled, err := b.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer pooled.Release()
	for name, single := range map[string]interface {
		ratelimit.Pool
		Begin(ctx context.Context) (pgx.Tx, error)
	}{"Conn": conn, "PoolsConn": pooled} {
		t.Run(name, func(t *testing.T) { // not parallel: the connections are for as long as the test
			limiter, err := ratelimit.New(single, ratelimit.Config{})
			require.NoError(t, err)
			tx, err := single.Begin(t.Context())
			require.NoError(t, err)
			_, err = tx.Exec(t.Context(), `INSERT INTO work VALUES (1)`)
			require.NoError(t, err)
			for name, call := range map[string]func() error{
				"Take":    func() error { _, err := limiter.Take(t.Context(), roomy.For("a")); return err },
				"Reserve": func() error { _, err := limiter.Reserve(t.Context(), roomy.For("a")); return err },
				"Charge":  func() error { return limiter.Charge(t.Context(), roomy.For("a")) },
				"InTx":    func() error { return limiter.InTx(t.Context(), func(pgx.Tx) error { return nil }) },
			} {
				require.ErrorIs(t, call(), ratelimit.ErrInvalidConfig, name)
				require.ErrorContains(t, call(), "use WithTx", name)
			}
			requireAllowed(t, taking(roomy.For("a")), limiter.WithTx(tx))
			require.NoError(t, tx.Rollback(t.Context()))
			var rows int
			require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT count(*) FROM work`).Scan(&rows))
			require.Zero(t, rows)
			requireAllowed(t, taking(roomy.For("a")), limiter)
		})
	}
}

// A transaction that waits in a queue has a connection, so the head of the queue must not wait for one.
func TestInTxGetsEverybodyThroughOnAFewConnections(t *testing.T) {
	t.Parallel()
	onEach(t, testInTxGetsEverybodyThroughOnAFewConnections, onPostgres, inMemory)
}

func testInTxGetsEverybodyThroughOnAFewConnections(t *testing.T, on backend) {
	const workers, each = 64, 5
	b := on.setup(t, func(c *pgxpool.Config) { c.MaxConns = 4 })
	hot := ratelimit.Define("hot", hoard(workers*each))
	require.NoError(t, atonce.Do(workers, func(int) error {
		for range each {
			err := b.limiter.InTx(t.Context(), func(tx pgx.Tx) error {
				d, err := b.limiter.WithTx(tx).Take(t.Context(), hot.Global())
				if err != nil {
					return err
				}
				return d.Err()
			})
			if err != nil {
				return err
			}
		}
		return nil
	}))
	require.InDelta(t, 0, b.row(t, "hot", "").Value, 1e-3)
}

// A reservation made when the limit was smaller returns its tokens, and takes nothing else.
func TestCancelAfterTheLimitWasRaisedTakesNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, shards := range []int{1, 8} {
		raised := func(capacity float64) ratelimit.Request {
			policy := hoard(capacity)
			policy.Shards = shards
			return ratelimit.Define(fmt.Sprint("raised/", shards), policy).For("key")
		}
		small, large := raised(10), raised(100)
		cancelled, err := b.limiter.Reserve(t.Context(), small.Cost(4))
		require.NoError(t, err)
		settled, err := b.limiter.Reserve(t.Context(), small.Cost(4))
		require.NoError(t, err)
		require.NoError(t, b.limiter.Reset(t.Context(), large))
		require.NoError(t, b.limiter.Cancel(t.Context(), cancelled.ID))
		require.InDelta(t, 100, tokens(t, b.limiter, large), 1e-3)
		require.NoError(t, b.limiter.Settle(t.Context(), settled.ID, large.Cost(6)))
		require.InDelta(t, 98, tokens(t, b.limiter, large), 1e-3)
	}
}

// Owed tokens may exceed the capacity, and so may a credit against them.
func TestCreditIsCappedByTheCapacityAndNotByItsOwnSize(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limit := ratelimit.Define("owing", hoard(10))
	_, err := b.limiter.Reserve(t.Context(), limit.For("key").Cost(20))
	require.NoError(t, err)
	require.NoError(t, b.limiter.Credit(t.Context(), limit.For("key").Cost(15)))
	require.InDelta(t, 5, b.row(t, "owing", "key").Value, 1e-3)
	require.NoError(t, b.limiter.Credit(t.Context(), limit.For("key").Cost(15)))
	require.InDelta(t, 10, b.row(t, "owing", "key").Value, 1e-3)
}
