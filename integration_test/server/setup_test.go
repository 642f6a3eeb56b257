//go:build unix

// Package server_test tests limits on a failing server: commits that were not on disk yet, a standby that takes over, a
// disk that is full, a clock that steps. Each has servers of its own.
package server_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// No test leaves a goroutine behind, also after faults.
func TestMain(m *testing.M) { testkit.Main(m) }

const capacity = 100_000

// The limits of the load. They gain less than a thousandth of a token during a test.
var (
	sent     = ratelimit.Define("sent", world.Hoard(capacity))
	reserved = ratelimit.Define("reserved", ratelimit.FixedWindow{Rate: capacity, Period: world.Century})
)

// application is a program that takes tokens and writes down its work in the same transactions.
type application struct{ *world.World }

// connect returns the application on a server.
func connect(t *testing.T, url string, configure ...func(*pgxpool.Config)) *application {
	t.Helper()
	return &application{world.Open(t, url, append(configure, func(c *pgxpool.Config) { c.MaxConns = 8 })...)}
}

// one returns the only value of a query's only row.
func one[T any](t *testing.T, pool *pgxpool.Pool, sql string, arguments ...any) (value T) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), sql, arguments...).Scan(&value), sql)
	return value
}

// do takes a token, reserves another, and writes the work down, in one transaction.
func (a *application) do(ctx context.Context, worker, n int) error {
	key := fmt.Sprint(n % 5)
	return a.Limiter.InTx(ctx, func(tx pgx.Tx) error {
		bound := a.Limiter.WithTx(tx)
		if err := bound.Require(ctx, sent.For(key)); err != nil {
			return err
		}
		r, err := bound.Reserve(ctx, reserved.For(key))
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `INSERT INTO public.work VALUES ($1, $2, $3)`, worker, n, r.ID)
		return err
	})
}

// requireWhole checks that work, tokens and reservations are of the same transactions.
func (a *application) requireWhole(t *testing.T) {
	t.Helper()
	work := one[int](t, a.Pool, `SELECT count(*) FROM public.work`)
	for _, limit := range []ratelimit.Limit{sent, reserved} {
		taken := one[float64](t, a.Pool, `SELECT coalesce(sum($2 - value), 0) FROM ratelimit.buckets WHERE name = $1 AND key <> 'the first call'`,
			limit.Name(), float64(capacity))
		require.Equal(t, work, int(math.Round(taken)), "tokens of %s", limit.Name())
	}
	require.Equal(t, work, one[int](t, a.Pool, `SELECT count(*) FROM ratelimit.reservations`))
	require.Equal(t, work, one[int](t, a.Pool, `SELECT count(DISTINCT id) FROM ratelimit.reservations JOIN public.work ON id::text = reservation`))
}

// load is a group of workers that do work until they are stopped, also while the server fails. It counts their answers.
type load struct {
	acked [workers]atomic.Int64 // of each worker: it continues only after an acknowledgement of its work
	stop  context.CancelFunc
	done  sync.WaitGroup
}

const workers = 4

// startLoad makes each worker do its work. A worker repeats each piece until it is acknowledged, and stops if the
// outcome of a piece is unknown.
func (a *application) startLoad(t *testing.T) *load {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	l := &load{stop: cancel}
	t.Cleanup(l.finish)
	for worker := range workers {
		l.done.Go(func() {
			for ctx.Err() == nil {
				n := int(l.acked[worker].Load())
				// Not on the load's context: every answer counts, also the last.
				if err := a.do(context.WithoutCancel(ctx), worker, n); err == nil {
					l.acked[worker].Add(1)
				} else if errors.Is(err, ratelimit.ErrCommitUnknown) {
					return
				}
			}
		})
	}
	return l
}

// awaitAcks waits until every running worker has that many more pieces of work acknowledged.
func (l *load) awaitAcks(t *testing.T, more int64) {
	t.Helper()
	before := l.acks()
	world.Eventually(t, "work is done", func() bool {
		for worker := range workers {
			if l.acked[worker].Load() < before[worker]+more {
				return false
			}
		}
		return true
	})
}

// acks returns how many acknowledged pieces of work each worker has.
func (l *load) acks() (acked [workers]int64) {
	for worker := range workers {
		acked[worker] = l.acked[worker].Load()
	}
	return acked
}

func (l *load) finish() {
	l.stop()
	l.done.Wait()
}

// requireSuffixLost checks, on the remaining work, that each worker lost only its last pieces, none of the first
// certain ones, and that no piece is there twice or unrequested. It returns how many acknowledged pieces were lost.
func (l *load) requireSuffixLost(t *testing.T, left *application, certain [workers]int64) (lost int64) {
	t.Helper()
	acked := l.acks()
	for worker := range workers {
		n := one[int64](t, left.Pool, `SELECT count(*) FROM public.work WHERE worker = $1`, worker)
		last := one[int64](t, left.Pool, `SELECT coalesce(max(n) + 1, 0) FROM public.work WHERE worker = $1`, worker)
		require.Equal(t, last, n, "worker %d lost work before work that is left", worker)
		require.GreaterOrEqual(t, n, certain[worker], "worker %d", worker)
		require.LessOrEqual(t, n, acked[worker]+1, "worker %d", worker)
		lost += max(acked[worker]-n, 0)
	}
	return lost
}

// awaitServer returns when the server takes connections, and the limiter works on them.
func (a *application) awaitServer(t *testing.T) {
	t.Helper()
	a.Pool.Reset()
	world.Eventually(t, "the limiter works again", func() bool {
		return a.Limiter.Require(t.Context(), sent.For("the first call")) == nil
	})
}

// startServer starts a server of the test's own, with the tables of the limits and of the work, and the application on
// it.
func startServer(t *testing.T, opts postgrestest.Options) (*postgrestest.Server, *application) {
	t.Helper()
	server := postgrestest.StartWith(t, opts)
	a := connect(t, server.URL())
	require.NoError(t, migrations.Up(t.Context(), a.Pool, migrations.Config{}))
	a.Exec(t, `CREATE TABLE public.work (worker integer, n integer, reservation text NOT NULL, PRIMARY KEY (worker, n))`)
	require.NoError(t, a.Limiter.Require(t.Context(), sent.For("the first call"))) // stores the fingerprint
	return server, a
}

// sqlstate returns the code of the server's error that err wraps, or "".
func sqlstate(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}
