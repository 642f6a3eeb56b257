package integration_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
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

// An ID of no reservation, also one whose transaction or savepoint was undone, is an error, after which a transaction goes on.
func TestWhatWasNeverReservedIsRefused(t *testing.T) {
	t.Parallel()
	b := setupWork(t)
	d := b.desk(t, ratelimit.Config{})
	outer := d.begin(t, pgx.ReadCommitted)
	inner, err := outer.Begin(t.Context())
	require.NoError(t, err)
	undone, err := d.limiter.WithTx(inner).Reserve(t.Context(), roomy.For("undone"))
	require.NoError(t, err)
	require.NoError(t, inner.Rollback(t.Context()))
	gone, err := d.limiter.WithTx(outer).Reserve(t.Context(), roomy.For("undone"))
	require.NoError(t, err)
	require.NoError(t, outer.Rollback(t.Context()))
	for name, id := range map[string]string{
		"Unknown": unknownID, "OfARollback": gone.ID, "OfASavepointRolledBack": undone.ID, "NotUTF8": "2b1f8a5e-9c47-4d0a-b3e6-7f1c2d9e8a4\xff",
		"LongerThanAnybodyWaits": strings.Repeat("2b1f8a5e", 1e5), "WhatSomebodyMightInject": "'; DROP TABLE ratelimit.reservations; --",
	} {
		for _, c := range lifeChanges {
			require.ErrorIs(t, c.make(t.Context(), d.limiter, "key", id), ratelimit.ErrNotReserved, name)
			for _, level := range levels {
				tx, key := d.begin(t, level.level), name+c.name+level.name
				require.ErrorIs(t, c.make(t.Context(), d.limiter.WithTx(tx), "key", id), ratelimit.ErrNotReserved, key)
				_, err := tx.Exec(t.Context(), "INSERT INTO work VALUES ($1)", key)
				require.NoError(t, err)
				require.NoError(t, tx.Commit(t.Context()))
				requireWork(t, b, key)
			}
		}
	}
	require.Empty(t, d.reservations(t))
	require.Empty(t, d.rows(t, ""))
}

// A reservation and its end in one transaction are one change, or none.
func TestReserveAndEndInOneTransaction(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, c := range lifeChanges {
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

func TestReservationsTableRefusesAnUnknownState(t *testing.T) {
	t.Parallel()
	d := setup(t).desk(t, ratelimit.Config{})
	d.reserve(t, roomy.For("key"))
	for state, ok := range map[string]bool{"open": true, "settled": true, "cancelled": true, "expired": true, "": false, "Open": false, "lost": false} {
		_, err := d.pool.Exec(t.Context(), "UPDATE ratelimit.reservations SET state = $1", state)
		require.Equal(t, ok, err == nil, state)
	}
}

// ending is a call that ends or renews a reservation of four tokens.
type ending struct {
	name    string
	expires bool    // whether it is by Expire
	release bool    // of ReleaseExpired
	stale   bool    // whether the work has lost its slot by then
	charges float64 // the tokens that it takes from the bucket; below zero: returns
	make    call    // with a request for the changed limit
}

const changeReserved = 4.0

// endings returns all of the ways.
func endings() []ending {
	settle := func(cost float64) call {
		return func(ctx context.Context, l *ratelimit.Limiter, id string, r ratelimit.Request) error {
			return l.Settle(ctx, id, r.Cost(cost))
		}
	}
	bare := func(ctx context.Context, l *ratelimit.Limiter, id string, _ ratelimit.Request) error {
		return l.Settle(ctx, id)
	}
	return []ending{
		{name: "SettleAnOverage", charges: 1, make: settle(5)},
		{name: "SettleASurplus", charges: -1, make: settle(3)},
		{name: "SettleTheEstimate", make: settle(4)},
		{name: "SettleBare", make: bare},
		{name: "Cancel", charges: -4, make: everyCall["Cancel"]},
		{name: "ExpireAndKeep", expires: true, make: everyCall["Expire"]},
		{name: "ExpireAndRelease", expires: true, release: true, charges: -4, make: everyCall["Expire"]},
		{name: "Renew", charges: 4, make: everyCall["Renew"]},
		{name: "StartOfStaleWork", stale: true, charges: 4, make: everyCall["Start"]},
	}
}

// config returns the Config of a Limiter whose reservations expire as the ending needs it.
func (e ending) config() ratelimit.Config {
	c := ratelimit.Config{ReleaseExpired: e.release}
	if e.stale {
		c.StaleAfter = time.Microsecond
	}
	if e.expires {
		c.ExpireAfter = time.Microsecond
	}
	return c
}

// changedPolicies are the policies to change a limit from and to: other rates, capacities, kinds and numbers of rows.
func changedPolicies() map[string]ratelimit.Policy {
	policies := map[string]ratelimit.Policy{
		"Quick":  ratelimit.TokenBucket{Rate: 6000, Period: time.Minute, Capacity: 800},
		"Slow":   ratelimit.TokenBucket{Rate: 6, Period: time.Minute, Capacity: 800},
		"Small":  ratelimit.TokenBucket{Rate: 60, Period: time.Minute, Capacity: 8},
		"Window": ratelimit.FixedWindow{Rate: 80, Period: time.Hour, Capacity: 800, Start: clockNoon},
		"Short":  ratelimit.FixedWindow{Rate: 1, Period: time.Second, Capacity: 800, Start: clockNoon},
	}
	for _, shards := range []int{2, 8} {
		policies[fmt.Sprintf("Shards%d", shards)] = ratelimit.TokenBucket{Rate: 60, Period: time.Minute, Capacity: 800, Shards: shards}
	}
	policies["WindowShards8"] = ratelimit.FixedWindow{Rate: 80, Period: time.Hour, Capacity: 800, Start: clockNoon, Shards: 8}
	return policies
}

var commitNames = []string{"Standalone", "InTx", "ReadCommitted", "RepeatableRead", "Serializable"}

// windowOf returns the number of the window that holds at.
func windowOf(w ratelimit.FixedWindow, at time.Time) int64 { return int64(at.Sub(w.Start) / w.Period) }

// After any change of a limit, the end of a reservation takes or returns exactly its tokens, under the new policy. It adds and
// removes no others.
func TestAReservationEndsUnderTheTermsTheLimitHasNow(t *testing.T) {
	t.Parallel()
	policies := changedPolicies()
	names := slices.Sorted(maps.Keys(policies))
	for i, from := range names {
		for j, to := range names {
			old, now := policies[from], policies[to]
			t.Run(from+"To"+to, func(t *testing.T) {
				t.Parallel()
				if j != (i+1)%len(names) {
					testsize.Long(t, "64 pairs of policies; in the short tier each policy comes first once, and second once")
				}
				b, ways, n := setup(t), commits(), 0
				for _, e := range endings() {
					for _, taken := range testsize.Of([]float64{790}, []float64{6, 790, 1500}) {
						way := commitNames[n%len(commitNames)]
						n++
						key := fmt.Sprint(e.name, way, taken)
						before, after := ratelimit.Define("changed", old).For(key), ratelimit.Define("changed", now).For(key)
						d := b.desk(t, e.config())
						first := before.Cost(taken - changeReserved)
						if taken <= before.Limit().Capacity() {
							requireAllowed(t, taking(first), d.limiter)
						} else {
							require.NoError(t, d.limiter.Charge(t.Context(), first))
						}
						r := d.reserve(t, before.Cost(changeReserved))
						d.clock.set(r.ReadyAt.Add(400 * time.Millisecond))
						held := tokens(t, d.limiter, after)
						require.NoError(t, ways[way](t.Context(), d, func(limiter *ratelimit.Limiter) error {
							return e.make(t.Context(), limiter, r.ID, after)
						}), key)
						want := min(after.Limit().Capacity(), held-e.charges)
						if w, ok := now.(ratelimit.FixedWindow); ok && e.charges < 0 && windowOf(w, r.ReadyAt) < windowOf(w, d.clock.now()) {
							want = held // its tokens were for a window that is over
						}
						require.InDelta(t, want, tokens(t, d.limiter, after), 1e-6, key)
					}
				}
			})
		}
	}
}

// A process that does not know a limit ends its reservations under their original terms. That suffices for a correct credit: it
// uses no rate, and a bucket without a row stays full.
func TestAStrangerGivesBackWhatWasTaken(t *testing.T) {
	t.Parallel()
	for _, e := range endings() {
		if e.charges >= 0 || !e.expires && e.name != "Cancel" {
			continue
		}
		for name, raised := range map[string]ratelimit.Policy{
			"Quicker": ratelimit.TokenBucket{Rate: 1000, Period: time.Second, Capacity: 500},
			"Slower":  ratelimit.TokenBucket{Rate: 1, Period: time.Hour, Capacity: 500},
			"Window":  ratelimit.FixedWindow{Rate: 1, Period: time.Hour, Capacity: 500, Start: clockNoon},
		} {
			t.Run(e.name+"/"+name, func(t *testing.T) {
				t.Parallel()
				b := setup(t)
				d := b.desk(t, e.config())
				taken := ratelimit.Define("met", ratelimit.PerSecond(100)).For("taken")
				spare, now := ratelimit.Define("met", ratelimit.PerSecond(100)).For("deleted"), ratelimit.Define("met", raised)
				r := d.reserve(t, taken.Cost(changeReserved), spare.Cost(changeReserved))
				d.at(500 * time.Millisecond)
				requireAllowed(t, taking(taken.Cost(100)), d.limiter)
				b.exec(t, "DELETE FROM ratelimit.buckets WHERE key = 'deleted'") // as Prune does with a full one

				d.at(time.Minute)
				held := tokens(t, d.limiter, now.For("taken"))
				config := e.config()
				config.AsOf = d.clock.now
				stranger := d.with(t, config)
				require.NoError(t, e.make(t.Context(), stranger, r.ID, taken))
				d.requireTokens(t, min(500, held+changeReserved), now.For("taken"))
				d.requireTokens(t, 500, now.For("deleted"))
			})
		}
	}
}
