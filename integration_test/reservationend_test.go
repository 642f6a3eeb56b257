package integration_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// change is a call on a reservation of eight lookups and one roomy, under one key.
type change func(ctx context.Context, limiter *ratelimit.Limiter, key, id string) error

func settling(ctx context.Context, limiter *ratelimit.Limiter, key, id string) error {
	return limiter.Settle(ctx, id, lookups.For(key).Cost(3), roomy.For(key).Cost(5))
}

// byID is a call of everyCall that needs no request.
func byID(name string) change {
	return func(ctx context.Context, l *ratelimit.Limiter, _, id string) error {
		return everyCall[name](ctx, l, id, ratelimit.Request{})
	}
}

var cancelling, starting, renewing = byID("Cancel"), byID("Start"), byID("Renew")

// lifeChanges are all of them, and what a change leaves in the buckets.
var lifeChanges = []struct {
	name           string
	make           change
	lookups, roomy float64
}{
	{"Settle", settling, 7, 1e6 - 5},
	{"Cancel", cancelling, 10, 1e6},
	{"Start", starting, 2, 1e6 - 1},
	{"Renew", renewing, -6, 1e6 - 2},
}

// commits are the ways in which a change is committed.
func commits() map[string]func(context.Context, *desk, func(*ratelimit.Limiter) error) error {
	ways := map[string]func(context.Context, *desk, func(*ratelimit.Limiter) error) error{
		"Standalone": func(_ context.Context, d *desk, fn func(*ratelimit.Limiter) error) error { return fn(d.limiter) },
		"InTx": func(ctx context.Context, d *desk, fn func(*ratelimit.Limiter) error) error {
			return d.limiter.InTx(ctx, func(tx pgx.Tx) error { return fn(d.limiter.WithTx(tx)) })
		},
	}
	for _, level := range levels {
		ways[level.name] = func(ctx context.Context, d *desk, fn func(*ratelimit.Limiter) error) error {
			_, err := atonce.Tx(ctx, d.db(), level.level, func(tx pgx.Tx) error { return fn(d.limiter.WithTx(tx)) })
			return err
		}
	}
	return ways
}

// Of several concurrent ends of a reservation only one happens, once, and all calls learn which.
func TestOneEndWins(t *testing.T) {
	t.Parallel()
	onEach(t, testOneEndWins, onPostgres, inMemory)
}

func testOneEndWins(t *testing.T, on backend) {
	b := on.setup(t)
	for way, commit := range commits() {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			d, key := b.desk(t, ratelimit.Config{MaxAttempts: 1000}), t.Name()
			r := d.reserve(t, lookups.For(key).Cost(8), roomy.For(key))
			var done, ended [2]atomic.Int64
			require.NoError(t, atonce.Do(10, func(worker int) error {
				which := worker % 2
				err := commit(t.Context(), d, func(limiter *ratelimit.Limiter) error {
					return lifeChanges[which].make(t.Context(), limiter, key, r.ID)
				})
				switch {
				case err == nil:
					done[which].Add(1)
				case errors.Is(err, ratelimit.ErrReservationEnded):
					ended[which].Add(1)
					err = nil
				}
				return err
			}))
			winner := 0
			if done[1].Load() > 0 {
				winner = 1
			}
			require.Equal(t, [2]int64{5, 5}, [2]int64{done[winner].Load(), ended[1-winner].Load()})
			require.NoError(t, lifeChanges[winner].make(t.Context(), d.limiter, key, r.ID), "again, when all is over")
			d.requireTokens(t, lifeChanges[winner].lookups, lookups.For(key))
			d.requireTokens(t, lifeChanges[winner].roomy, roomy.For(key))
		})
	}
}

// A call on a transaction that has ended says so, and changes nothing.
func TestCallsOnAClosedTransaction(t *testing.T) {
	t.Parallel()
	onEach(t, testCallsOnAClosedTransaction, onPostgres, inMemory)
}

func testCallsOnAClosedTransaction(t *testing.T, on backend) {
	b := on.setup(t)
	tx := b.begin(t, pgx.ReadCommitted)
	require.NoError(t, tx.Commit(t.Context()))
	for name, call := range everyCall {
		if name != "Prune" { // which is for no transaction
			require.ErrorIs(t, call(t.Context(), b.limiter.WithTx(tx), unknownID, lookups.For("key")), pgx.ErrTxClosed, name)
		}
	}
	require.Empty(t, b.rows(t, ""))
}

// A program that is newer than its database says so, and takes nothing.
func TestReservationsWithoutTheirMigration(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(t, "DROP TABLE ratelimit.reservations")
	requireAllowed(t, taking(roomy.For("key")), b.limiter)
	before := b.rows(t, "")
	for name, call := range everyCall {
		switch name {
		case "Reserve", "Settle", "Cancel", "Start", "Started", "Renew", "Expire":
			require.ErrorIs(t, call(t.Context(), b.limiter, unknownID, roomy.For("key")), ratelimit.ErrNotMigrated, name)
		}
	}
	require.Equal(t, before, b.rows(t, ""))
	require.NoError(t, b.limiter.Credit(t.Context(), roomy.For("key")), "which needs no such table")
}
