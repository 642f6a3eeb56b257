package integration_test

import (
	"context"
	"fmt"
	"regexp"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// nextDB calls the functions of the next version: take_2 in place of take_1.
type nextDB struct{ ratelimit.DB }

var ofThisVersion = regexp.MustCompile(`_1\b`)

func next(sql string) string { return ofThisVersion.ReplaceAllLiteralString(sql, "_2") }

func (d nextDB) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return d.DB.Exec(ctx, next(sql), args...)
}

func (d nextDB) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return d.DB.Query(ctx, next(sql), args...)
}

func (d nextDB) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	for _, query := range batch.QueuedQueries {
		query.SQL = next(query.SQL)
	}
	return d.DB.SendBatch(ctx, batch)
}

// nextTx is a transaction of a program of the next version.
type nextTx struct {
	pgx.Tx

	db nextDB
}

func (tx nextTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return tx.db.Exec(ctx, sql, args...)
}

func (tx nextTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return tx.db.Query(ctx, sql, args...)
}

func (tx nextTx) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	return tx.db.SendBatch(ctx, batch)
}

// nextPool is the pool of a program of the next version.
type nextPool struct {
	nextDB

	pool *pgxpool.Pool
}

func (p nextPool) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	tx, err := p.pool.BeginTx(ctx, options)
	return nextTx{tx, nextDB{tx}}, err
}

// createNext creates the functions of the next version, which differ from those of this one in nothing but their names.
func createNext(ctx context.Context, pool *pgxpool.Pool) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `SELECT pg_get_functiondef(oid) FROM pg_proc
			WHERE pronamespace = 'ratelimit'::regnamespace AND proname ~ '_1$'`)
		if err != nil {
			return err
		}
		definitions, err := pgx.CollectRows(rows, pgx.RowTo[string])
		for _, definition := range append([]string{"SET LOCAL check_function_bodies = off"}, definitions...) {
			if err == nil {
				_, err = tx.Exec(ctx, next(definition))
			}
		}
		return err
	})
}

// program is a running program of a version.
type program struct {
	pool    ratelimit.Pool
	limiter *ratelimit.Limiter
}

// TestADeployment promises that a program of this version and one of the next share rows, reservations and leases
// exactly, from the migration to the end of the last program of this version.
func TestADeployment(t *testing.T) {
	t.Parallel()
	b := setup(t, func(c *pgxpool.Config) { c.MaxConns = 2 * racers })
	later := nextPool{nextDB{b.pool}, b.pool}
	limiter, err := ratelimit.New(later, ratelimit.Config{})
	require.NoError(t, err)
	programs := []program{{b.pool, b.limiter}, {later, limiter}}

	before := ratelimit.Define("before", hoard(raceCapacity)).For("ana")
	require.NoError(t, atonce.Do(racers, func(racer int) error {
		if racer == 0 { // the migration runs while programs of this version take
			return createNext(t.Context(), b.pool)
		}
		_, err := b.limiter.Take(t.Context(), before)
		return err
	}))
	t.Run("Beside", func(t *testing.T) { // not parallel: the functions of this version go after it
		for kind, policy := range map[string]ratelimit.Policy{
			"bucket":  hoard(raceCapacity),
			"sliding": ratelimit.SlidingWindow{Rate: raceCapacity, Period: ratelimit.Day},
			"slots":   ratelimit.Concurrency{Slots: raceCapacity, Lease: time.Hour},
		} {
			for _, place := range callers() {
				t.Run(kind+"/"+place.name, func(t *testing.T) {
					t.Parallel()
					hot := ratelimit.Define(kind+"-"+place.name, policy).For("ana")
					require.EqualValues(t, raceCapacity, givenBy(t, programs, place, hot))
				})
			}
		}
		t.Run("Handed", func(t *testing.T) {
			t.Parallel()
			requireHanded(t, programs[0], programs[1])
			requireHanded(t, programs[1], programs[0])
		})
	})

	require.InDelta(t, raceCapacity-racers+1, tokens(t, limiter, before), 1e-3)
	_, err = b.pool.Exec(t.Context(), `DO $$ BEGIN EXECUTE (SELECT 'DROP FUNCTION ' || string_agg(oid::regprocedure::text, ', ')
		FROM pg_proc WHERE pronamespace = 'ratelimit'::regnamespace AND proname ~ '_1$'); END $$`)
	require.NoError(t, err)
	_, err = b.limiter.Take(t.Context(), before)
	require.ErrorIs(t, err, ratelimit.ErrNotMigrated)
	d, err := limiter.Take(t.Context(), before)
	require.NoError(t, err)
	require.True(t, d.Allowed)
}

// givenBy has racers of all programs request more units than there are, and returns how many they were given.
func givenBy(t *testing.T, programs []program, place caller, hot ratelimit.Request) int64 {
	t.Helper()
	var given atomic.Int64
	require.NoError(t, atonce.Do(racers, func(racer int) error {
		p := programs[racer%len(programs)]
		for range racersTries {
			allowed := false
			err := place.within(t.Context(), p.pool, p.limiter, func(l *ratelimit.Limiter) (err error) {
				if _, is := hot.Limit().Policy().(ratelimit.Concurrency); is {
					var lease ratelimit.Lease
					lease, err = l.Acquire(t.Context(), hot)
					allowed = lease.Allowed
					return err
				}
				allowed, err = taking(hot)(t.Context(), l)
				return err
			})
			if err != nil {
				return err
			}
			if allowed {
				given.Add(1)
			}
		}
		return nil
	}))
	return given.Load()
}

// requireHanded promises that one program ends what the other began.
func requireHanded(t *testing.T, from, to program) {
	t.Helper()
	key := fmt.Sprintf("%p", from.limiter)
	bucket := ratelimit.Define("handed", hoard(raceCapacity)).For(key)
	r, err := from.limiter.Reserve(t.Context(), bucket.Cost(5))
	require.NoError(t, err)
	require.NoError(t, to.limiter.Settle(t.Context(), r.ID, bucket.Cost(2)))
	require.InDelta(t, raceCapacity-2, tokens(t, from.limiter, bucket), 1e-3)

	slots := ratelimit.Define("slots", ratelimit.Concurrency{Slots: 1, Lease: time.Hour}).For(key)
	lease := acquire(t, from.limiter, slots)
	require.NoError(t, to.limiter.Release(t.Context(), lease.ID))
	require.Equal(t, 1.0, tokens(t, from.limiter, slots))
}
