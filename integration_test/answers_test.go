package integration_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// echoing is a pool whose server answers the statements that only read with every row twice, as a database that
// keeps the table in several places may.
type echoing struct{ ratelimit.Pool }

func twice(sql string) string {
	return "SELECT q.* FROM (" + sql + ") AS q, generate_series(1, 2)"
}

func (p echoing) Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error) {
	return p.Pool.Query(ctx, twice(sql), arguments...)
}

func (p echoing) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	last := batch.QueuedQueries[batch.Len()-1]
	last.SQL = twice(last.SQL)
	return p.Pool.SendBatch(ctx, batch)
}

func TestMoreRowsThanAskedAreAnError(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "it answers for a statement of the fast path")
	b := setup(t)
	alone, err := ratelimit.New(echoing{b.pool}, ratelimit.Config{NoBatching: true})
	require.NoError(t, err)
	batched, err := ratelimit.New(echoing{b.pool}, ratelimit.Config{})
	require.NoError(t, err)
	for name, call := range map[string]verb{
		"Value":        valuing(roomy.For("key")),
		"Check":        checking(roomy.For("key"), other.For("key")),
		"ShardedValue": valuing(wide.For("key")),
		"ShardedTake":  taking(wide.For("key").Cost(2e5)), // of all rows
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := call(t.Context(), alone)
			require.ErrorContains(t, err, "rows")
			require.ErrorContains(t, atonce.Do(8, func(int) error { return errOf(call(t.Context(), batched)) }), "rows")
		})
	}
}

// Calls on a single connection are no batch. ACallApartStaysOnItsGoroutine of internal/batch tests that no other goroutine uses the connection.
func TestCallsOnASingleConnectionAreNotFolded(t *testing.T) {
	t.Parallel()
	b := setup(t)
	pooled, err := b.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer pooled.Release()
	for name, pool := range map[string]ratelimit.Pool{"ConnectionOfAPool": pooled, "Connection": pooled.Conn()} {
		limiter, err := ratelimit.New(pool, ratelimit.Config{Observer: observing(func(event ratelimit.Event) {
			if _, is := event.(ratelimit.Batched); is {
				t.Error("a batch")
			}
		})})
		require.NoError(t, err)
		for _, call := range []verb{taking(wide.For(name)), taking(roomy.For(name), wide.For(name)), checking(roomy.For(name), wide.For(name))} {
			requireAllowed(t, call, limiter)
		}
		require.NoError(t, limiter.Close(t.Context()))
	}
}
