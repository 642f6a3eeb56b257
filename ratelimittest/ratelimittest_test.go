package ratelimittest_test

import (
	"context"
	"errors"
	"os/exec"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

var ten = ratelimit.Define("ten", ratelimit.TokenBucket{Rate: 10, Period: time.Minute})

// holds checks how many tokens the bucket of request holds.
func holds(t *testing.T, limiter *ratelimit.Limiter, want float64, request ratelimit.Request) {
	t.Helper()
	v, err := limiter.Value(t.Context(), request)
	require.NoError(t, err)
	require.Equal(t, want, v.Tokens)
}

// takes takes what the requests cost, which must be there.
func takes(ctx context.Context, t *testing.T, limiter *ratelimit.Limiter, requests ...ratelimit.Request) {
	t.Helper()
	d, err := limiter.Take(ctx, requests...)
	require.NoError(t, err)
	require.True(t, d.Allowed)
}

// Limiters of one DB are what processes on one database are.
func TestDBIsShared(t *testing.T) {
	t.Parallel()
	db, clock := ratelimittest.NewDB(), ratelimittest.NewClock()
	var limiters [2]*ratelimit.Limiter
	for i := range limiters {
		limiter, err := ratelimit.New(db, ratelimit.Config{AsOf: clock.Now})
		require.NoError(t, err)
		limiters[i] = limiter
	}
	takes(t.Context(), t, limiters[0], ten.For("key").Cost(4))
	holds(t, limiters[1], 6, ten.For("key"))
	hashed, err := ratelimit.New(db, ratelimit.Config{HashKey: []byte("sixteen bytes or more")})
	require.NoError(t, err)
	_, err = hashed.Take(t.Context(), ten.For("key"))
	require.ErrorIs(t, err, ratelimit.ErrHashKeyMismatch)
}

func TestTransactions(t *testing.T) {
	t.Parallel()

	// A call that takes from a row that a transaction holds waits. Other calls, refusals and checks never wait.
	t.Run("HoldRows", func(t *testing.T) {
		t.Parallel()
		db, clock := ratelimittest.NewDB(), ratelimittest.NewClock()
		limiter, err := ratelimit.New(db, ratelimit.Config{AsOf: clock.Now, Timeout: -1})
		require.NoError(t, err)
		tx, err := db.Begin(t.Context())
		require.NoError(t, err)
		takes(t.Context(), t, limiter.WithTx(tx), ten.For("held").Cost(4))
		holds(t, limiter.WithTx(tx), 6, ten.For("held"))
		holds(t, limiter, 10, ten.For("held"))
		takes(t.Context(), t, limiter, ten.For("free"))
		soon, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		_, err = limiter.Take(soon, ten.For("held"))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		waits := make(chan error)
		go func() {
			_, err := limiter.Take(t.Context(), ten.For("held"))
			waits <- err
		}()
		require.NoError(t, tx.Commit(t.Context()))
		require.NoError(t, <-waits)
		holds(t, limiter, 5, ten.For("held"))
		_, err = limiter.WithTx(tx).Take(t.Context(), ten.For("held"))
		require.ErrorIs(t, err, pgx.ErrTxClosed)
	})

	// Two transactions in opposite orders: one of them is run again.
	t.Run("DeadlocksEnd", func(t *testing.T) {
		t.Parallel()
		limiter := ratelimittest.New(t, ratelimittest.NewClock())
		var g errgroup.Group
		orders := [][2]ratelimit.Request{{ten.For("a"), ten.For("b")}, {ten.For("b"), ten.For("a")}}
		met := [2]chan struct{}{make(chan struct{}), make(chan struct{})}
		for i, order := range orders {
			g.Go(func() error {
				first := true
				return limiter.InTx(t.Context(), func(tx pgx.Tx) error {
					if _, err := limiter.WithTx(tx).Take(t.Context(), order[0]); err != nil {
						return err
					}
					if first {
						first = false
						close(met[i])
						<-met[1-i]
					}
					_, err := limiter.WithTx(tx).Take(t.Context(), order[1])
					return err
				})
			})
		}
		require.NoError(t, g.Wait())
		holds(t, limiter, 8, ten.For("a"))
		holds(t, limiter, 8, ten.For("b"))
	})

	t.Run("OfSomethingElse", func(t *testing.T) {
		t.Parallel()
		limiter := ratelimittest.New(t, ratelimittest.NewClock())
		var foreign struct{ pgx.Tx }
		_, err := limiter.WithTx(&foreign).Take(t.Context(), ten.For("key"))
		require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
	})
}

// SQL in a transaction in memory fails, and the transaction with it.
func TestSQLHasNoDatabase(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	limiter := ratelimittest.New(t, nil)
	batch := &pgx.Batch{}
	batch.Queue(`SELECT 1`)
	for name, statement := range map[string]func(tx pgx.Tx) error{
		"Exec": func(tx pgx.Tx) error { _, err := tx.Exec(ctx, `SELECT 1`); return err },
		"Query": func(tx pgx.Tx) error {
			_, err := tx.Query(ctx, `SELECT 1`) //nolint:sqlclosecheck // it fails
			return err
		},
		"QueryRow":  func(tx pgx.Tx) error { return tx.QueryRow(ctx, `SELECT 1`).Scan() },
		"Prepare":   func(tx pgx.Tx) error { _, err := tx.Prepare(ctx, "", `SELECT 1`); return err },
		"CopyFrom":  func(tx pgx.Tx) error { _, err := tx.CopyFrom(ctx, nil, nil, nil); return err },
		"SendBatch": func(tx pgx.Tx) error { return tx.SendBatch(ctx, batch).Close() },
	} {
		err := limiter.InTx(ctx, func(tx pgx.Tx) error {
			takes(ctx, t, limiter.WithTx(tx), ten.For(name))
			return statement(tx)
		})
		require.ErrorIs(t, err, ratelimittest.ErrNoDatabase, name)
		holds(t, limiter, 10, ten.For(name))
	}
}

// In a bubble of package synctest, a call that waits for a row takes no real time until its timeout.
func TestATimeoutInABubble(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		limiter := ratelimittest.New(t, nil)
		require.NoError(t, limiter.InTx(t.Context(), func(tx pgx.Tx) error {
			takes(t.Context(), t, limiter.WithTx(tx), ten.For("key"))
			began := time.Now()
			_, err := limiter.Take(t.Context(), ten.For("key"))
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.Equal(t, 10*time.Second, time.Since(began), "the default of Config.Timeout")
			return nil
		}))
	})
}

// The package adds no dependencies to the Limiter's.
func TestDependencies(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "runs the go command")
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{with .Module}}{{.Path}}{{end}}", ".").Output()
	require.NoError(t, err)
	for _, module := range strings.Fields(string(out)) {
		require.Contains(t, []string{
			"github.com/pgratelimit/pgratelimit", "github.com/jackc/pgx/v5", "github.com/jackc/pgpassfile", "github.com/jackc/pgservicefile",
			"github.com/jackc/puddle/v2", "golang.org/x/sync", "golang.org/x/text", // of pgxpool
		}, module)
	}
}

// TestARolledBackExpireForgetsNothing expects that the IDs of old reservations stay known after a rollback, and are
// forgotten at the commit, as in Postgres.
func TestARolledBackExpireForgetsNothing(t *testing.T) {
	t.Parallel()
	clock := ratelimittest.NewClock()
	limiter := ratelimittest.New(t, clock)
	r, err := limiter.Reserve(t.Context(), ten.For("key"))
	require.NoError(t, err)
	require.NoError(t, limiter.Settle(t.Context(), r.ID))
	clock.Advance(30 * ratelimit.Day)
	undo := errors.New("undo")
	for _, result := range []error{undo, nil} {
		require.ErrorIs(t, limiter.InTx(t.Context(), func(tx pgx.Tx) error {
			within := limiter.WithTx(tx)
			_, err := within.Expire(t.Context())
			require.NoError(t, err)
			require.ErrorIs(t, within.Cancel(t.Context(), r.ID), ratelimit.ErrNotReserved)
			return result
		}), result)
		want := ratelimit.ErrReservationEnded
		if result == nil {
			want = ratelimit.ErrNotReserved
		}
		require.ErrorIs(t, limiter.Cancel(t.Context(), r.ID), want)
	}
}
