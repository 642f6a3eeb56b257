package integration_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// outrun is a pool on which the look at whose row is held loses against another transaction, as it may where
// default_transaction_isolation is above READ COMMITTED.
type outrun struct {
	ratelimit.Pool
	looks atomic.Int64
}

func (p *outrun) Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error) {
	if strings.Contains(sql, "Find those of the rows that are not free") && p.looks.Add(1) == 1 {
		return p.Pool.Query(ctx, `SELECT name, key, shard FROM ratelimit.buckets WHERE ratelimit.lose()`)
	}
	return p.Pool.Query(ctx, sql, arguments...)
}

// A call that finds a row held, and loses a conflict when it looks which, waits as it would have.
func TestAHeldRowIsWaitedForWhenTheLookLosesAConflict(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "the general path looks in the statement that locks")
	for verb, call := range map[string]func(ctx context.Context, limiter *ratelimit.Limiter, id string) error{
		"Charge": func(ctx context.Context, limiter *ratelimit.Limiter, _ string) error {
			return limiter.Charge(ctx, roomy.For("held"), other.For("free"))
		},
		"Settle": func(ctx context.Context, limiter *ratelimit.Limiter, id string) error {
			return limiter.Settle(ctx, id, other.For("free").Cost(2), roomy.For("held").Cost(2))
		},
	} {
		t.Run(verb, func(t *testing.T) {
			t.Parallel()
			b := setup(t, roomyPool)
			b.exec(t, `CREATE FUNCTION ratelimit.lose() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE SQLSTATE '40001'; END $$`)
			r, err := b.limiter.Reserve(t.Context(), other.For("free"), roomy.For("held"))
			require.NoError(t, err)
			pool := &outrun{Pool: b.pool}
			limiter, err := ratelimit.New(pool, ratelimit.Config{NoBatching: true, Timeout: patient})
			require.NoError(t, err)
			release := b.holdRow(t, "roomy", "held")
			caller := askFor(t, func(ctx context.Context) (ratelimit.Decision, error) {
				err := call(ctx, limiter, r.ID)
				return ratelimit.Decision{Allowed: err == nil}, err
			})
			eventually(t, "the call has looked, or has ended", func() bool { return pool.looks.Load() > 0 || caller.hasEnded() })
			require.Positive(t, pool.looks.Load(), caller.err)
			eventually(t, "the call waits for the row, or has ended", func() bool { return waiting(t, b.pool) > 0 || caller.hasEnded() })
			caller.requireWaits(t)
			release()
			caller.requireAllowed(t)
		})
	}
}
