package integration_test

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// If a connection breaks while its transaction waits or has its turn, InTx retries. If it breaks at COMMIT, InTx does not.
func TestASharedTurnOnAConnectionThatBreaks(t *testing.T) {
	t.Parallel()
	hot := ratelimit.Define("hot", hoard(100_000)).Global()
	for request, want := range map[string]error{
		"pg_try_advisory_lock": nil, "bucket": nil, "commit": ratelimit.ErrCommitUnknown,
	} {
		for _, side := range []cut{cutRequest, cutAnswer} {
			for _, named := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s %d %t", request, side, named), func(t *testing.T) {
					t.Parallel()
					cutter := &cutter{}
					b := setup(t, cutter.on, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec })
					b.limiter = b.with(t, ratelimit.Config{SharedQueues: true})
					take := func(named bool) error {
						ctx := t.Context()
						if named {
							ctx = ratelimit.WithQueue(ctx, hot)
						}
						return b.limiter.InTx(ctx, func(tx pgx.Tx) error {
							_, err := b.limiter.WithTx(tx).Take(ctx, hot)
							return err
						})
					}
					require.NoError(t, take(true))
					cutter.arm(request, side, 1)
					require.ErrorIs(t, take(named), want)
					cutter.arm("", 0, 0)
					eventually(t, "no lock is held", func() bool {
						return b.count(t, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted
							AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`) == 0
					})
					require.NoError(t, take(named))
					taken := 3.0
					if want != nil && side == cutRequest {
						taken--
					}
					require.InDelta(t, 100_000-taken, b.held(t, "hot", ""), 0.01)
				})
			}
		}
	}
}
