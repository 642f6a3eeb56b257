package integration_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

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

func cancelling(ctx context.Context, limiter *ratelimit.Limiter, _, id string) error {
	return limiter.Cancel(ctx, id)
}

func starting(ctx context.Context, limiter *ratelimit.Limiter, _, id string) error {
	_, err := limiter.Start(ctx, id)
	return err
}

func renewing(ctx context.Context, limiter *ratelimit.Limiter, _, id string) error {
	_, err := limiter.Renew(ctx, id)
	return err
}

// changes are all of them, and what a change leaves in the buckets.
var changes = []struct {
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

func TestEndingTwiceChangesNothingTwice(t *testing.T) {
	t.Parallel()
	const atOnce = 10
	b := setup(t)
	for _, c := range changes[:2] {
		for way, commit := range commits() {
			t.Run(c.name+"/"+way, func(t *testing.T) {
				t.Parallel()
				d, key := b.desk(t, ratelimit.Config{MaxAttempts: 1000}), t.Name()
				r := d.reserve(t, lookups.For(key).Cost(8), roomy.For(key))
				for range 2 { // and once more, when all is over
					require.NoError(t, atonce.Do(atOnce, func(int) error {
						return commit(t.Context(), d, func(limiter *ratelimit.Limiter) error { return c.make(t.Context(), limiter, key, r.ID) })
					}))
					d.requireTokens(t, c.lookups, lookups.For(key))
					d.requireTokens(t, c.roomy, roomy.For(key))
				}
				require.NoError(t, d.limiter.InTx(t.Context(), func(tx pgx.Tx) error {
					return errors.Join(c.make(t.Context(), d.limiter.WithTx(tx), key, r.ID), c.make(t.Context(), d.limiter.WithTx(tx), key, r.ID))
				}))
				d.requireTokens(t, c.lookups, lookups.For(key))
			})
		}
	}
}

// Of several concurrent ends of a reservation only one happens, and all calls learn which.
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
					return changes[which].make(t.Context(), limiter, key, r.ID)
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
			d.requireTokens(t, changes[winner].lookups, lookups.For(key))
			d.requireTokens(t, changes[winner].roomy, roomy.For(key))
		})
	}
}

func TestAnotherEndIsRefused(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for i, first := range changes[:2] {
		second := changes[1-i]
		t.Run(second.name+"After"+first.name, func(t *testing.T) {
			t.Parallel()
			d, key := b.desk(t, ratelimit.Config{}), t.Name()
			r := d.reserve(t, lookups.For(key).Cost(8), roomy.For(key))
			require.NoError(t, first.make(t.Context(), d.limiter, key, r.ID))
			for _, level := range levels {
				tx := d.begin(t, level.level)
				require.ErrorIs(t, second.make(t.Context(), d.limiter.WithTx(tx), key, r.ID), ratelimit.ErrReservationEnded)
				require.NoError(t, first.make(t.Context(), d.limiter.WithTx(tx), key, r.ID))
				require.NoError(t, tx.Commit(t.Context()))
			}
			require.ErrorIs(t, second.make(t.Context(), d.limiter, key, r.ID), ratelimit.ErrReservationEnded)
			d.requireTokens(t, first.lookups, lookups.For(key))
			d.requireTokens(t, first.roomy, roomy.For(key))
		})
	}
}

// rolledBack returns the ID of a reservation whose transaction, or savepoint, was undone.
func rolledBack(t *testing.T, d *desk, inSavepoint bool) string {
	t.Helper()
	outer := d.begin(t, pgx.ReadCommitted)
	tx := outer
	if inSavepoint {
		var err error
		tx, err = outer.Begin(t.Context())
		require.NoError(t, err)
	}
	r, err := d.limiter.WithTx(tx).Reserve(t.Context(), roomy.For("rolled back"))
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(t.Context()))
	if inSavepoint {
		require.NoError(t, outer.Commit(t.Context()))
	}
	return r.ID
}

func TestWhatWasNeverReservedIsRefused(t *testing.T) {
	t.Parallel()
	b := setupWork(t)
	d := b.desk(t, ratelimit.Config{})
	ids := map[string]string{
		"Unknown":                 "2b1f8a5e-9c47-4d0a-b3e6-7f1c2d9e8a40",
		"OfARollback":             rolledBack(t, d, false),
		"OfASavepointRolledBack":  rolledBack(t, d, true),
		"Empty":                   "",
		"NoUUID":                  "42",
		"UUIDInBraces":            "{2b1f8a5e-9c47-4d0a-b3e6-7f1c2d9e8a40}",
		"UUIDAndMore":             "2b1f8a5e-9c47-4d0a-b3e6-7f1c2d9e8a40\n",
		"WithNUL":                 "2b1f8a5e-9c47-4d0a-b3e6-7f1c2d9e8a4\x00",
		"NotUTF8":                 "2b1f8a5e-9c47-4d0a-b3e6-7f1c2d9e8a4\xff",
		"LongerThanAnybodyWaits":  strings.Repeat("2b1f8a5e", 1e5),
		"WhatSomebodyMightInject": "'; DROP TABLE ratelimit.reservations; --",
	}
	for name, id := range ids {
		for _, c := range changes {
			t.Run(c.name+"/"+name, func(t *testing.T) { // not parallel: it counts all rows
				require.NoError(t, atonce.Do(4, func(int) error {
					return isNotReserved(c.make(t.Context(), d.limiter, "key", id))
				}))
				for _, level := range levels {
					tx := d.begin(t, level.level)
					require.NoError(t, isNotReserved(c.make(t.Context(), d.limiter.WithTx(tx), "key", id)))
					key := t.Name() + level.name
					_, err := tx.Exec(t.Context(), "INSERT INTO work VALUES ($1)", key)
					require.NoError(t, err)
					require.NoError(t, isNotReserved(c.make(t.Context(), d.limiter.WithTx(tx), "key", id)))
					require.NoError(t, tx.Commit(t.Context()))
					requireWork(t, b, key)
				}
				require.Empty(t, d.reservations(t))
				require.Empty(t, d.rows(t, ""))
			})
		}
	}
}

func isNotReserved(err error) error {
	if !errors.Is(err, ratelimit.ErrNotReserved) {
		return fmt.Errorf("want ErrNotReserved, got %w", err)
	}
	return nil
}

// What a transaction changes of a reservation, its rollback changes back, and the next one may do it.
func TestRollbackUndoesTheReservationAndTheBuckets(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, c := range changes {
		t.Run(c.name, func(t *testing.T) { // not parallel: it counts all rows
			d, key := b.desk(t, ratelimit.Config{StaleAfter: time.Minute}), t.Name()
			r := d.reserve(t, lookups.For(key).Cost(8), roomy.For(key))
			before, recorded := d.rows(t, ""), d.reservations(t)
			for _, level := range levels {
				tx := d.begin(t, level.level)
				require.NoError(t, c.make(t.Context(), d.limiter.WithTx(tx), key, r.ID))
				require.NoError(t, tx.Rollback(t.Context()))

				tx = d.begin(t, level.level)
				inner, err := tx.Begin(t.Context())
				require.NoError(t, err)
				require.NoError(t, c.make(t.Context(), d.limiter.WithTx(inner), key, r.ID))
				require.NoError(t, inner.Rollback(t.Context()))
				require.NoError(t, tx.Commit(t.Context()))
			}
			changedMind := errors.New("changed my mind")
			require.ErrorIs(t, d.limiter.InTx(t.Context(), func(tx pgx.Tx) error {
				require.NoError(t, c.make(t.Context(), d.limiter.WithTx(tx), key, r.ID))
				require.NoError(t, d.limiter.WithTx(tx).Credit(t.Context(), lookups.For(key)))
				return changedMind
			}), changedMind)
			require.Equal(t, before, d.rows(t, ""))
			require.Equal(t, recorded, d.reservations(t))

			require.NoError(t, c.make(t.Context(), d.limiter, key, r.ID))
			d.requireTokens(t, c.lookups, lookups.For(key))
			d.requireTokens(t, c.roomy, roomy.For(key))
		})
	}
}

// A reservation and its end in one transaction are one change, or none.
func TestReserveAndEndInOneTransaction(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, c := range changes {
		for way, commit := range commits() {
			t.Run(c.name+"/"+way, func(t *testing.T) {
				t.Parallel()
				d, key := b.desk(t, ratelimit.Config{}), t.Name()
				require.NoError(t, commit(t.Context(), d, func(limiter *ratelimit.Limiter) error {
					r, err := limiter.Reserve(t.Context(), lookups.For(key).Cost(8), roomy.For(key))
					if err != nil {
						return err
					}
					return c.make(t.Context(), limiter, key, r.ID)
				}))
				d.requireTokens(t, c.lookups, lookups.For(key))
				d.requireTokens(t, c.roomy, roomy.For(key))
			})
		}
	}
}

// A window gets tokens back only while it is the window that paid, however much later the other limits of the reservation are ready.
func TestACreditGoesToTheWindowThatPaid(t *testing.T) {
	t.Parallel()
	onEach(t, testACreditGoesToTheWindowThatPaid, onPostgres, inMemory, byRoutedStatements)
}

func testACreditGoesToTheWindowThatPaid(t *testing.T, on backend) {
	b := on.setup(t)
	for kind, policy := range map[string]ratelimit.Policy{
		"Fixed":    ratelimit.FixedWindow{Rate: 10, Period: 24 * time.Hour, Start: clockNoon},
		"Calendar": ratelimit.CalendarWindow{Rate: 10, Resets: ratelimit.Daily},
	} {
		window, slow := ratelimit.Define("paid"+kind, policy), ratelimit.Define("slow"+kind, ratelimit.PerDay(1))
		for way, end := range map[string]func(l *ratelimit.Limiter, id, key string) error{
			"Cancel": func(l *ratelimit.Limiter, id, _ string) error { return l.Cancel(t.Context(), id) },
			"Settle": func(l *ratelimit.Limiter, id, key string) error {
				return l.Settle(t.Context(), id, window.For(key).Cost(0), slow.For(key).Cost(0))
			},
		} {
			for name, test := range map[string]struct {
				renewed bool
				day     time.Duration // of the end
				want    float64       // after all tokens were taken on that day
			}{
				"InTheSameWindow":       {false, 0, 8},
				"InALaterWindow":        {false, 5, 0},
				"InTheWindowOfRenew":    {true, 5, 8},
				"AfterTheWindowOfRenew": {true, 7, 0},
			} {
				t.Run(kind+"/"+way+"/"+name, func(t *testing.T) {
					t.Parallel()
					d, key := b.desk(t, ratelimit.Config{StaleAfter: time.Hour}), t.Name()
					r := d.reserve(t, window.For(key).Cost(8), slow.For(key).Cost(11))
					if test.renewed {
						d.at(5 * 24 * time.Hour)
						_, err := d.limiter.Renew(t.Context(), r.ID)
						require.NoError(t, err)
					}
					d.at(test.day * 24 * time.Hour)
					value, err := d.limiter.Value(t.Context(), window.For(key))
					require.NoError(t, err)
					taken, err := d.limiter.Take(t.Context(), window.For(key).Cost(value.Tokens))
					require.NoError(t, err)
					require.True(t, taken.Allowed)
					require.NoError(t, end(d.limiter, r.ID, key))
					d.requireTokens(t, test.want, window.For(key))
				})
			}
		}
	}
}
