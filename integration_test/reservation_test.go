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
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// The limits of the tests of reservations.
var (
	lookups = ratelimit.Define("lookups", ratelimit.PerSecond(10))
	words   = ratelimit.Define("words", ratelimit.TokenBucket{Rate: 100, Period: time.Minute, Capacity: 50})

	// mortgaged may owe twenty tokens.
	mortgaged = ratelimit.Define("mortgaged", ratelimit.TokenBucket{Rate: 10, Period: time.Second, MaxReserved: 20})
	hourly    = ratelimit.Define("hourly", ratelimit.FixedWindow{Rate: 10, Period: time.Hour, Capacity: 30, Start: clockNoon})
)

const staleAfter = 10 * time.Second

// desk is a limiter whose clock the test sets. Its clock stands at noon until then.
type desk struct {
	*bundle
	clock *clock
}

// desk returns a desk on the same rows.
func (b *bundle) desk(t *testing.T, config ratelimit.Config) *desk {
	t.Helper()
	d := &desk{clock: &clock{}}
	d.at(0)
	config.AsOf = d.clock.now
	d.bundle = &bundle{pool: b.pool, memory: b.memory, schema: b.schema, limiter: b.with(t, config)}
	return d
}

// at sets the clock to so long after noon.
func (d *desk) at(span time.Duration) { d.clock.set(clockNoon.Add(span)) }

// reserve reserves, which must be allowed.
func (d *desk) reserve(t *testing.T, requests ...ratelimit.Request) ratelimit.Reservation {
	t.Helper()
	r, err := d.limiter.Reserve(t.Context(), requests...)
	require.NoError(t, err)
	require.True(t, r.Allowed)
	return r
}

// requireTokens checks what the buckets hold now.
func (d *desk) requireTokens(t *testing.T, want float64, requests ...ratelimit.Request) {
	t.Helper()
	for _, request := range requests {
		value, err := d.limiter.Value(t.Context(), request)
		require.NoError(t, err)
		require.InDelta(t, want, value.Tokens, 1e-9, request)
	}
}

// expire expires, which must end so many reservations.
func (d *desk) expire(t *testing.T, want int) {
	t.Helper()
	ended, err := d.limiter.Expire(t.Context())
	require.NoError(t, err)
	require.Equal(t, want, ended)
}

// act is a call on the reservation of a story, or on the bucket, at an instant.
type act struct {
	at   time.Duration // since noon
	call string        // Start, Renew, Cancel, Expire or Tokens
	want any           // the wait, the error, the number of reservations that end, or the tokens
}

// The instants in the life of a reservation are exact to the microsecond, which random histories hardly
// ever hit.
func TestReservationsOnTheMicrosecond(t *testing.T) {
	t.Parallel()
	const us, half, expired, forgotten = time.Microsecond, 500 * time.Millisecond, time.Hour, time.Hour + ratelimit.Week
	const now = time.Duration(0)
	look, hour, room := lookups.For("key").Cost(15), hourly.For("key").Cost(28), roomy.For("key")
	for name, story := range map[string]struct {
		request ratelimit.Request
		delay   time.Duration // of the reservation, which is made at noon
		acts    []act
	}{
		"WaitsUntilReadyAt":       {look, half, []act{{half - us, "Start", us}, {half, "Start", now}}},
		"BeforeStaleAtKeepsTurn":  {look, half, []act{{half + staleAfter - us, "Start", now}, {half + staleAfter - us, "Tokens", 10.0}}},
		"AtStaleAtPaysAgain":      {look, half, []act{{half + staleAfter, "Start", half}, {half + staleAfter, "Tokens", -5.0}}},
		"CancelInItsWindow":       {hour, 0, []act{{time.Hour - us, "Cancel", nil}, {time.Hour - us, "Tokens", 30.0}}},
		"CancelInTheNextReturns0": {hour, 0, []act{{time.Hour, "Cancel", nil}, {time.Hour, "Tokens", 12.0}}},
		"CancelInTheWindowOfRenew": {hour, 0, []act{ // 12 are there then, and 16 are owed
			{time.Hour, "Renew", 2 * time.Hour},
			{4*time.Hour - us, "Tokens", 4.0},
			{4*time.Hour - us, "Cancel", nil},
			{4*time.Hour - us, "Tokens", 30.0},
		}},
		"ExpiresAfterExpireAfter": {room, 0, []act{{expired, "Expire", 0}, {expired + us, "Expire", 1}, {expired + us, "Expire", 0}}},
		"IsForgottenAWeekLater": {room, 0, []act{
			{0, "Cancel", nil},
			{forgotten, "Expire", 0},
			{forgotten, "Cancel", nil},
			{forgotten + us, "Expire", 0},
			{forgotten + us, "Cancel", ratelimit.ErrNotReserved},
		}},
		"IsKeptAfterItExpiredLate": {room, 0, []act{
			{forgotten + us, "Expire", 1}, {forgotten + us, "Cancel", ratelimit.ErrReservationEnded},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onEach(t, func(t *testing.T, on backend) {
				t.Helper()
				d := on.setup(t).desk(t, ratelimit.Config{StaleAfter: staleAfter, ExpireAfter: expired})
				r := d.reserve(t, story.request)
				require.Equal(t, story.delay, r.Delay())
				turns := map[string]func(context.Context, string) (ratelimit.Turn, error){
					"Start": func(ctx context.Context, id string) (ratelimit.Turn, error) { return d.limiter.Start(ctx, id) },
					"Renew": d.limiter.Renew,
				}
				for i, act := range story.acts {
					d.at(act.at)
					switch want := act.want.(type) {
					case time.Duration:
						turn, err := turns[act.call](t.Context(), r.ID)
						require.NoError(t, err)
						require.Equal(t, want, turn.Wait, "act %d", i)
					case float64:
						d.requireTokens(t, want, story.request)
					case int:
						d.expire(t, want)
					default:
						err, _ := want.(error)
						require.ErrorIs(t, d.limiter.Cancel(t.Context(), r.ID), err, "act %d", i)
					}
				}
			}, onPostgres, inMemory)
		})
	}
}

// Of several concurrent ends of a reservation only one happens, once, and all calls learn which.
func TestAReservationEndsOnce(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, on backend) {
		t.Helper()
		b := on.setup(t)
		for _, place := range callers() {
			for limits := 1; limits <= 2; limits++ {
				t.Run(fmt.Sprint(place.name, limits), func(t *testing.T) {
					t.Parallel()
					d, key := b.desk(t, ratelimit.Config{MaxAttempts: 1000}), t.Name()
					r := d.reserve(t, []ratelimit.Request{lookups.For(key).Cost(8), roomy.For(key)}[:limits]...)
					actual := []ratelimit.Request{lookups.For(key).Cost(3), roomy.For(key).Cost(5)}[:limits]
					ends := [2]func(l *ratelimit.Limiter) error{
						func(l *ratelimit.Limiter) error { return l.Settle(t.Context(), r.ID, actual...) },
						func(l *ratelimit.Limiter) error { return l.Cancel(t.Context(), r.ID) },
					}
					var done, ended [2]atomic.Int64
					require.NoError(t, atonce.Do(10, func(worker int) error {
						which := worker % 2
						err := place.within(t.Context(), d.db(), d.limiter, ends[which])
						switch {
						case err == nil:
							done[which].Add(1)
						case errors.Is(err, ratelimit.ErrReservationEnded):
							ended[which].Add(1)
							err = nil
						}
						return err
					}))
					winner, used := 0, [2]float64{3, 5}
					if done[1].Load() > 0 {
						winner, used = 1, [2]float64{}
					}
					require.Equal(t, [2]int64{5, 5}, [2]int64{done[winner].Load(), ended[1-winner].Load()})
					require.NoError(t, ends[winner](d.limiter), "again, when all is over")
					for i, request := range actual {
						d.requireTokens(t, request.Limit().Capacity()-used[i], request)
					}
				})
			}
		}
	}, onPostgres, inMemory)
}

// Work whose reservation is gone takes a new turn under the same ID, once, however many workers start it, and in each
// place of a call. A rollback undoes it, and a limit that refuses takes nothing. The limits have what this program
// knows of them now: the policy of the written request holds only for a name that the program has not used.
func TestStartReservesAgainWhatIsGone(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, on backend) {
		t.Helper()
		for _, place := range callers() {
			t.Run(place.name, func(t *testing.T) {
				t.Parallel()
				representative(t, place.name, "Standalone", "Serializable")
				b := on.setup(t) // of its own, because Expire ends the reservations of all callers
				d, key := b.desk(t, ratelimit.Config{MaxAttempts: 1000, StaleAfter: staleAfter}), t.Name()
				bounded := ratelimit.Define("bounded", ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: 4, MaxReserved: 4})
				requests := []ratelimit.Request{lookups.For(key).Plan("pro").Cost(8), bounded.For(key).Cost(6)}
				written, err := d.limiter.MarshalRequests(requests...)
				require.NoError(t, err)
				r := d.reserve(t, requests...)
				d.at(2 * time.Second)
				d.expire(t, 0)
				d.at(3 * ratelimit.Day)
				d.expire(t, 1)
				d.at(20 * ratelimit.Day)
				d.expire(t, 0)
				_, err = d.limiter.Start(t.Context(), r.ID)
				require.ErrorIs(t, err, ratelimit.ErrNotReserved)

				d = b.desk(t, ratelimit.Config{MaxAttempts: 1000, StaleAfter: staleAfter}) // a program that has not used the names
				d.at(20 * ratelimit.Day)
				read, err := d.limiter.UnmarshalRequests(written)
				require.NoError(t, err)
				require.NoError(t, d.limiter.Charge(t.Context(), bounded.For(key).Cost(3)))
				start := func(l *ratelimit.Limiter) (turn ratelimit.Turn, err error) {
					return l.Start(t.Context(), r.ID, read...)
				}
				turn, err := start(d.limiter)
				require.NoError(t, err)
				require.Equal(t, time.Second, turn.Wait, "of 1 of bounded 6 are 1 below what it may owe")
				require.Equal(t, ratelimit.Cancelled, turn.State)
				d.requireTokens(t, 10, lookups.For(key))
				d.requireTokens(t, 1, bounded.For(key))

				d.at(20*ratelimit.Day + time.Second)
				require.NoError(t, atonce.Do(10, func(int) error {
					return place.within(t.Context(), d.db(), d.limiter, func(l *ratelimit.Limiter) error {
						turn, err := start(l)
						if err == nil && (turn.ID != r.ID || turn.State != ratelimit.Open || turn.Wait != 4*time.Second) {
							err = fmt.Errorf("the turn is %+v", turn)
						}
						return err
					})
				}))
				d.requireTokens(t, 2, lookups.For(key))
				d.requireTokens(t, -4, bounded.For(key))
				d.at(20*ratelimit.Day + 5*time.Second)
				turn, err = d.limiter.Start(t.Context(), r.ID)
				require.NoError(t, err)
				require.Zero(t, turn.Wait)
				require.Equal(t, staleAfter, turn.StaleAt.Sub(turn.ReadyAt))
				require.NoError(t, d.limiter.Cancel(t.Context(), r.ID))
				d.requireTokens(t, 10, lookups.For(key))
				d.requireTokens(t, 4, bounded.For(key))

				other := "00000000-0000-4000-8000-" + fmt.Sprintf("%012x", len(place.name)*1000+len(on.name))
				require.ErrorIs(t, d.limiter.InTx(t.Context(), func(tx pgx.Tx) error {
					_, err := d.limiter.WithTx(tx).Start(t.Context(), other, read...)
					require.NoError(t, err)
					return errUndone
				}), errUndone)
				_, err = d.limiter.Start(t.Context(), other)
				require.ErrorIs(t, err, ratelimit.ErrNotReserved)
				_, err = d.limiter.Start(t.Context(), other, bounded.For(key).Cost(9))
				require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
				_, err = d.limiter.Start(t.Context(), other)
				require.ErrorIs(t, err, ratelimit.ErrNotReserved)
				d.requireTokens(t, 10, lookups.For(key))
			})
		}
	}, onPostgres, inMemory, byRoutedStatements)
}

// A call on a transaction that has ended says so, and changes nothing.
func TestCallsOnAClosedTransaction(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, on backend) {
		t.Helper()
		b := on.setup(t)
		tx := b.begin(t, pgx.ReadCommitted)
		require.NoError(t, tx.Commit(t.Context()))
		for name, call := range everyCall {
			if name != "Prune" { // which is for no transaction
				require.ErrorIs(t, call(t.Context(), b.limiter.WithTx(tx), unknownID, lookups.For("key")), pgx.ErrTxClosed, name)
			}
		}
		require.Empty(t, b.rows(t, ""))
	}, onPostgres, inMemory)
}

// A program that is newer than its database says so, and takes nothing.
func TestReservationsWithoutTheirMigration(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(t, "DROP TABLE ratelimit.reservations CASCADE")
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

// releasing expires reservations after an hour, and gives their tokens back.
var releasing = ratelimit.Config{ExpireAfter: time.Hour, ReleaseExpired: true}

// patience returns a context for calls that must not wait. If one waits, the test fails.
func patience(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// Several processes expire, while a transaction holds more reservations than are read at once: each reservation that is
// free ends once, and is returned once. In a transaction Expire does the same.
func TestExpireSkipsLockedReservations(t *testing.T) {
	t.Parallel()
	const locked, free, keys = 120, 60, 7
	d := setup(t).desk(t, releasing)
	ids := make([]string, locked+free)
	for _, part := range [][]string{ids[:locked], ids[locked:]} {
		require.NoError(t, atonce.Do(len(part), func(i int) error {
			r, err := d.limiter.Reserve(t.Context(), roomy.For(fmt.Sprint(i%keys)).Cost(10))
			part[i] = r.ID
			return err
		}))
		d.at(time.Second) // those that are locked come first
	}
	holder := d.begin(t, pgx.ReadCommitted)
	_, err := holder.Exec(t.Context(), "SELECT FROM ratelimit.reservations WHERE id = ANY ($1::uuid[]) FOR UPDATE", ids[:locked])
	require.NoError(t, err)
	d.at(2 * time.Hour)
	ended := make([]int, 4)
	require.NoError(t, atonce.Do(len(ended), func(process int) (err error) {
		ended[process], err = d.limiter.Expire(patience(t))
		return err
	}))
	require.Equal(t, free, ended[0]+ended[1]+ended[2]+ended[3])
	expireInTx := func(want int) {
		require.NoError(t, pgx.BeginFunc(t.Context(), d.pool, func(tx pgx.Tx) error {
			ended, err := d.limiter.WithTx(tx).Expire(patience(t))
			require.Equal(t, want, ended)
			return err
		}))
	}
	expireInTx(0)
	require.NoError(t, holder.Rollback(t.Context()))
	expireInTx(locked)
	for n := range keys {
		d.requireTokens(t, 1e6, roomy.For(fmt.Sprint(n)))
	}
}

// A locked bucket keeps only the reservations open that would return tokens to it.
func TestExpireSkipsALockedBucket(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, on backend) {
		t.Helper()
		d := on.setup(t).desk(t, releasing)
		for range 3 {
			d.reserve(t, roomy.For("held").Cost(10))
			d.reserve(t, roomy.For("free").Cost(10))
		}
		holder := d.begin(t, pgx.ReadCommitted)
		requireAllowed(t, taking(roomy.For("held")), d.limiter.WithTx(holder))
		d.at(2 * time.Hour)
		ended, err := d.limiter.Expire(patience(t))
		require.ErrorContains(t, err, "55P03", "it is told once, and the others of the bucket are not tried")
		require.Equal(t, 1, strings.Count(err.Error(), "55P03"))
		require.Equal(t, 3, ended)
		d.requireTokens(t, 1e6, roomy.For("free"))
		require.NoError(t, holder.Rollback(t.Context()))
		d.expire(t, 3)
		d.requireTokens(t, 1e6, roomy.For("held"))
	}, onPostgres, inMemory)
}

// A reservation that cannot be ended does not keep the others from it.
func TestExpireSkipsAReservationThatFails(t *testing.T) {
	t.Parallel()
	b, failures, then := setup(t), 0, func() {}
	d := b.desk(t, ratelimit.Config{ExpireAfter: time.Hour, ReleaseExpired: true, Observer: observing(func(e event.Event) {
		switch e.(type) {
		case event.Failed:
			failures++
		case event.Pruned:
			then()
		}
	})})
	var broken []string
	for n := range 6 {
		r := d.reserve(t, roomy.For("key").Cost(10))
		if n%3 == 0 {
			broken = append(broken, r.ID)
		}
	}
	b.exec(t, "UPDATE ratelimit.reservations SET name = repeat('x', 65) WHERE id = ANY ($1::uuid[])", broken)
	d.at(2 * time.Hour)
	for _, want := range []int{4, 0} {
		ended, err := d.limiter.Expire(t.Context())
		require.Equal(t, want, ended)
		for _, id := range broken {
			require.ErrorContains(t, err, "expire "+id+": ")
		}
	}
	require.InDelta(t, 1e6-20, tokens(t, d.limiter, roomy.For("key")), 5)
	require.Equal(t, 2, failures, "one for each Expire")
	ctx, cancel := context.WithCancel(t.Context())
	then = cancel
	require.NoError(t, d.limiter.Maintain(ctx, time.Hour, roomy))
	require.Equal(t, 3, failures, "Maintain does not report it again")
}

// In a transaction Expire locks the buckets of all reservations in the order in which every call does, and so cannot
// deadlock with a transaction that locks in the same order.
func TestExpireInATransactionLocksInOrder(t *testing.T) {
	t.Parallel()
	d := setup(t).desk(t, releasing)
	d.reserve(t, roomy.For("z").Cost(10))
	d.at(time.Second)
	d.reserve(t, roomy.For("a").Cost(10))
	d.at(2 * time.Hour)

	holder := d.begin(t, pgx.ReadCommitted)
	requireAllowed(t, taking(roomy.For("a")), d.limiter.WithTx(holder))
	expired := make(chan error, 1)
	go func() {
		expired <- pgx.BeginTxFunc(t.Context(), d.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			ended, err := d.limiter.WithTx(tx).Expire(t.Context())
			if err == nil && ended != 2 {
				err = fmt.Errorf("%d ended", ended)
			}
			return err
		})
	}()
	eventually(t, "Expire waits for the bucket", func() bool { return waiting(t, d.pool) == 1 })
	requireAllowed(t, taking(roomy.For("z")), d.limiter.WithTx(holder))
	require.NoError(t, holder.Commit(t.Context()))
	require.NoError(t, <-expired)
	d.requireTokens(t, 1e6-1+1, roomy.For("a"))
	d.requireTokens(t, 1e6-1+1, roomy.For("z"))
}

// TestWindowsGetBackWhatTheyPaid promises that a reservation that several windows pay for gives back to a window what
// that window and later ones have paid. Otherwise a window would give more tokens than its capacity.
func TestWindowsGetBackWhatTheyPaid(t *testing.T) {
	t.Parallel()
	onEach(t, testWindowsGetBackWhatTheyPaid, onPostgres, inMemory)
}

func testWindowsGetBackWhatTheyPaid(t *testing.T, on backend) {
	b := on.setup(t)
	for n, policy := range []ratelimit.Policy{
		ratelimit.FixedWindow{Rate: 10, Period: 24 * time.Hour, Start: clockNoon},
		ratelimit.FixedWindow{Rate: 10, Period: 24 * time.Hour, Start: clockNoon, Shards: 2},
		ratelimit.CalendarWindow{Rate: 10, Resets: ratelimit.Daily, MaxReserved: 10},
	} {
		limit := ratelimit.Define(fmt.Sprint("paid", n), policy)
		for i, test := range []struct {
			after  int     // days
			actual float64 // 0: it is cancelled
			want   float64
		}{{0, 0, 5}, {1, 0, 5}, {2, 0, 10}, {0, 5, 0}, {1, 5, 5}, {1, 12, 3}, {1, 20, -5}} {
			d := b.desk(t, ratelimit.Config{})
			bucket := limit.For(fmt.Sprint(i))
			first := d.reserve(t, bucket.Cost(15)) // 10 tokens of this window, and 5 of the next
			d.reserve(t, bucket.Cost(5))           // 5 of the next
			d.at(time.Duration(test.after) * 24 * time.Hour)
			if test.actual == 0 {
				require.NoError(t, d.limiter.Cancel(t.Context(), first.ID))
			} else {
				require.NoError(t, d.limiter.Settle(t.Context(), first.ID, bucket.Cost(test.actual)))
			}
			d.requireTokens(t, test.want, bucket)
		}
	}
}

// What a renewal owes is stored, also if the reservation is ready when it was before.
func TestARenewalIsStored(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, on backend) {
		d := on.setup(t).desk(t, ratelimit.Config{})
		key := ratelimit.Define("daily", ratelimit.FixedWindow{Rate: 10, Period: ratelimit.Day, Start: clockNoon}).For("ada")
		d.reserve(t, key.Cost(9))
		r := d.reserve(t, key.Cost(2))
		turn, err := d.limiter.Renew(t.Context(), r.ID)
		require.NoError(t, err)
		require.Equal(t, r.ReadyAt, turn.ReadyAt)
		d.at(ratelimit.Day)
		d.requireTokens(t, 7, key)
		require.NoError(t, d.limiter.Cancel(t.Context(), r.ID))
		d.requireTokens(t, 9, key)
	}, onPostgres, inMemory, byRoutedStatements)
}

// Settle checks what it names also when the reservation has ended, because a wrong name is a bug of the caller.
func TestSettleAgainChecksItsRequests(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, on backend) {
		d := on.setup(t).desk(t, ratelimit.Config{})
		r := d.reserve(t, lookups.For("ada").Cost(3))
		require.NoError(t, d.limiter.Settle(t.Context(), r.ID, lookups.For("ada").Cost(1)))
		require.NoError(t, d.limiter.Settle(t.Context(), r.ID, lookups.For("ada").Cost(2)), "which changes nothing")
		require.ErrorIs(t, d.limiter.Settle(t.Context(), r.ID, words.For("ada")), ratelimit.ErrInvalidRequest)
		d.requireTokens(t, 9, lookups.For("ada"))
	}, onPostgres, inMemory)
}
