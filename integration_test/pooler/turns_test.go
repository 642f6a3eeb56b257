package pooler_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// turns returns how many sessions have a turn, or wait for one.
func (d *database) turns(t *testing.T, granted bool) int {
	t.Helper()
	return d.Count(t, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted = $1
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`, granted)
}

// holder is a transaction that has its turn at a bucket until it is let go.
type holder struct{ letGo, done chan error }

func hold(t *testing.T, l *ratelimit.Limiter, request ratelimit.Request) *holder {
	t.Helper()
	h, has := &holder{make(chan error), make(chan error, 1)}, make(chan struct{})
	go func() {
		h.done <- l.InTx(ratelimit.WithQueue(t.Context(), request), func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), "SELECT"); err != nil {
				return err
			}
			close(has)
			return <-h.letGo
		})
	}()
	<-has
	return h
}

func (h *holder) end() error {
	h.letGo <- nil
	return <-h.done
}

// The turns of Config.SharedQueues are session locks for a moment, but work through a pooler in transaction mode. The next
// transaction waits in the server, and after too long it continues without a turn. A client that disconnects while waiting leaves
// no lock behind. Two Limiters are two processes here.
func TestSharedTurnsThroughPgBouncer(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "PgBouncers of its own")
	for _, how := range atOnce {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			d := setup(t)
			url := mode(d.behind(t, postgrestest.TransactionPool), how)
			first := limiterOn(t, connect(t, url, 2), ratelimit.Config{SharedQueues: true})
			second := limiterOn(t, connect(t, url, 2), ratelimit.Config{SharedQueues: true})
			request := roomy.For("hot")
			take := func(ctx context.Context) chan error {
				done := make(chan error, 1)
				go func() {
					done <- second.InTx(ratelimit.WithQueue(ctx, request), func(tx pgx.Tx) error { return second.WithTx(tx).Require(ctx, request) })
				}()
				return done
			}

			// The second waits, and has its turn when the first has ended.
			h := hold(t, first, request)
			require.Equal(t, 1, d.turns(t, true))
			done := take(t.Context())
			world.Eventually(t, "the second waits", func() bool { return d.turns(t, false) == 1 || len(done) == 1 })
			require.NoError(t, h.end())
			require.NoError(t, <-done)
			require.Zero(t, d.turns(t, true))

			// It does not wait for ever.
			h = hold(t, first, request)
			require.NoError(t, <-take(t.Context()), "a second later it goes on without")
			require.Equal(t, 1, d.turns(t, true), "only the first has its turn")
			require.NoError(t, h.end())
			require.Zero(t, d.turns(t, true))

			// It goes away while it waits.
			h = hold(t, first, request)
			ctx, cancel := context.WithCancel(t.Context())
			done = take(ctx)
			world.Eventually(t, "the second waits again", func() bool { return d.turns(t, false) == 1 || len(done) == 1 })
			cancel()
			if err := <-done; err != nil { // else its second was over
				require.ErrorIs(t, err, context.Canceled)
			}
			require.NoError(t, h.end())
			world.Eventually(t, "no turn is left behind", func() bool { return d.turns(t, true) == 0 })
			require.NoError(t, <-take(t.Context()))
			require.Zero(t, d.turns(t, true))
		})
	}
}
