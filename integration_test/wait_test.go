package integration_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// turn is a limit with short waits: one token, and the next in a few milliseconds.
var turn = ratelimit.Define("turn", ratelimit.TokenBucket{Rate: 250, Period: time.Second, Capacity: 1})

// queued gains next to nothing while a test runs, and may owe.
var queued = ratelimit.Define("queued", ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: 1})

// reservedRow is a row of the reservations table.
type reservedRow struct {
	State     string
	ReadyUs   int64
	StartedUs *int64
	Release   bool
}

// reserved returns the reservations that were made, in the order of their moments.
func (b *bundle) reserved(t *testing.T) []reservedRow {
	t.Helper()
	found, err := b.pool.Query(t.Context(), fmt.Sprintf("SELECT state, ready_us, started_us, release FROM %s.reservations ORDER BY ready_us", b.schema))
	require.NoError(t, err)
	rows, err := pgx.CollectRows(found, pgx.RowToStructByPos[reservedRow])
	require.NoError(t, err)
	return rows
}

// stopped is a clock that stands still until it is started.
type stopped struct{ started atomic.Pointer[time.Time] }

func (c *stopped) start() { c.started.Store(new(time.Now())) }

func (c *stopped) now() time.Time {
	if started := c.started.Load(); started != nil {
		return clockNoon.Add(time.Since(*started))
	}
	return clockNoon
}

// Callers on one limit, each calling after the one before has reserved, are served in that order. By the limit's clock, which
// stands still until all have reserved, none starts before its moment.
func TestWaitServesInTheOrderOfAsking(t *testing.T) {
	t.Parallel()
	callers, ahead := testsize.Of(20, 50), testsize.Of(100.0, 250)
	b, clock := setup(t, func(c *pgxpool.Config) { c.MaxConns = 16 }), &stopped{}
	b.limiter = b.with(t, ratelimit.Config{AsOf: clock.now})
	takeAll(t, b.limiter, turn.Global())
	_, err := b.limiter.Reserve(t.Context(), turn.Global().Cost(ahead)) // so that no caller's turn is near
	require.NoError(t, err)
	var waits sync.WaitGroup
	answers := make([]ratelimit.Decision, callers)
	failed, back := make([]error, callers), make([]int64, callers)
	for i := range callers {
		waits.Go(func() {
			answers[i], failed[i] = b.limiter.Wait(t.Context(), turn.Global())
			back[i] = clock.now().UnixMicro()
		})
		eventually(t, "he has reserved", func() bool { return len(b.reserved(t)) == i+2 })
	}
	clock.start()
	waits.Wait()
	require.NoError(t, errors.Join(failed...))
	served := b.reserved(t)[1:]
	require.Len(t, served, callers)
	for i := range served {
		require.True(t, answers[i].Allowed)
		require.Equal(t, "settled", served[i].State)
		require.GreaterOrEqual(t, *served[i].StartedUs, served[i].ReadyUs)
		require.GreaterOrEqual(t, back[i], served[i].ReadyUs, "nobody is early")
		if i > 0 {
			require.InDelta(t, 4000, served[i].ReadyUs-served[i-1].ReadyUs, 2, "one every four milliseconds")
			require.Greater(t, answers[i].ResetAfter, answers[i-1].ResetAfter, "who asked later has to wait longer")
		}
	}
}

// Wait takes available tokens at once, in one round trip and without a reservation.
func TestWaitTakesWhatIsThere(t *testing.T) {
	t.Parallel()
	b, w := setupCounted(t)
	call := func() {
		d, err := b.limiter.Wait(t.Context(), roomy.For("a"), other.For("a"))
		require.NoError(t, err)
		require.True(t, d.Allowed)
	}
	call() // to prepare the statement
	trips := w.count(call)
	if !generalPath {
		require.Equal(t, 1, trips)
	}
	require.Empty(t, b.reserved(t))
	require.InDelta(t, 1e6-2, b.held(t, "roomy", "a"), 0.01)
}

// Waiting callers that are cancelled owe nothing: their reserved tokens are returned, and the other callers keep their turns.
func TestWaitThatIsCancelledLeavesNothingOwed(t *testing.T) {
	t.Parallel()
	const callers = 20
	b := setup(t, func(c *pgxpool.Config) { c.MaxConns = 16 })
	takeAll(t, b.limiter, queued.Global())
	ctx, cancel := context.WithCancel(t.Context())
	var waits sync.WaitGroup
	failed := make([]error, callers)
	for i := range callers {
		waits.Go(func() { _, failed[i] = b.limiter.Wait(ctx, queued.Global(), roomy.For("a").Cost(2)) })
	}
	eventually(t, "all have reserved", func() bool { return len(b.reserved(t)) == callers })
	require.InDelta(t, -callers, b.held(t, "queued", ""), 0.01)
	cancel()
	waits.Wait()
	for _, err := range failed {
		require.ErrorIs(t, err, context.Canceled)
	}
	for _, s := range b.reserved(t) {
		require.Equal(t, "cancelled", s.State)
	}
	require.InDelta(t, 0, b.held(t, "queued", ""), 0.01)
	require.InDelta(t, 1e6, b.held(t, "roomy", "a"), 0.01)
}

// Callers who are cancelled at any moment, while they ask too, leave nothing owed.
func TestWaitThatIsCancelledAtAnyMomentLeavesNothingOwed(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "hundreds of calls")
	b := setup(t, func(c *pgxpool.Config) { c.MaxConns = 8 })
	takeAll(t, b.limiter, queued.Global())
	seed := testsize.Seed(t)
	require.NoError(t, atonce.Do(8, func(worker int) error {
		random := rand.New(rand.NewPCG(seed, uint64(worker)))
		for range 25 {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(time.Duration(random.IntN(5000))*time.Microsecond, cancel)
			if _, err := b.limiter.Wait(ctx, queued.Global()); !errors.Is(err, context.Canceled) {
				return fmt.Errorf("not cancelled: %w", err)
			}
		}
		return nil
	}))
	for _, s := range b.reserved(t) {
		require.Equal(t, "cancelled", s.State)
	}
	require.InDelta(t, 0, b.held(t, "queued", ""), 0.01)
}

// A deadline that comes before the moment is a refusal at once: nothing is reserved.
func TestWaitRefusesWhatComesAfterTheDeadline(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limit := ratelimit.Define("slow", ratelimit.TokenBucket{Rate: 1, Period: time.Hour, Capacity: 2})
	window := ratelimit.Define("slowWindow", ratelimit.FixedWindow{Rate: 1, Period: 24 * time.Hour})
	rows := ratelimit.Define("slowRows", ratelimit.TokenBucket{Rate: 4, Period: 4 * time.Hour, Capacity: 4, Shards: 2})
	for _, c := range []struct {
		limit ratelimit.Limit
		cost  float64
		most  time.Duration
	}{
		{limit, 1, time.Hour}, {limit, 2, 2 * time.Hour}, {window, 1, 24 * time.Hour}, {rows, 1, time.Hour},
	} {
		key := fmt.Sprint(c.limit.Name(), c.cost)
		takeAll(t, b.limiter, c.limit.For(key))
		for _, requests := range [][]ratelimit.Request{{c.limit.For(key).Cost(c.cost)}, {roomy.For(key), c.limit.For(key).Cost(c.cost)}} {
			ctx, cancel := context.WithTimeout(t.Context(), patient)
			d, err := b.limiter.Wait(ctx, requests...)
			require.NoError(t, err)
			require.NoError(t, ctx.Err(), "it did not wait")
			cancel()
			require.False(t, d.Allowed)
			require.ErrorIs(t, d.Err(), ratelimit.ErrLimited)
			require.LessOrEqual(t, d.RetryAfter, c.most)
			if c.limit.Name() != "slowWindow" {
				require.InDelta(t, c.most-patient, d.RetryAfter, float64(time.Minute), "when a call with as much time would be served")
			}
		}
		require.Empty(t, b.reserved(t))
		require.InDelta(t, 0, b.held(t, c.limit.Name(), key), 0.01)
	}
	// what costs more than the bucket ever holds can be waited for, and not when there is too little time for it
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	d, err := b.limiter.Wait(ctx, limit.For("large").Cost(3))
	require.NoError(t, err)
	require.False(t, d.Allowed)
	require.Greater(t, d.RetryAfter, 200*365*24*time.Hour, "it is full, and no wait helps")
}

// A Wait over several windows that comes again after its RetryAfter, with as much time, is served.
func TestWaitOverSeveralWindowsSaysWhenItIsServed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := inMemory.setup(t)
		long := ratelimit.Define("long", ratelimit.FixedWindow{Rate: 2, Period: 24 * time.Hour, Start: clockNoon})
		short := ratelimit.Define("short", ratelimit.FixedWindow{Rate: 2, Period: 7 * time.Hour, Start: clockNoon})
		wait := func() ratelimit.Decision {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			d, err := b.limiter.Wait(ctx, long.Global().Cost(3), short.Global().Cost(3))
			require.NoError(t, err)
			return d
		}
		first := wait()
		require.False(t, first.Allowed)
		time.Sleep(first.RetryAfter)
		again := wait()
		require.True(t, again.Allowed, "it is told %v, and then %v", first.RetryAfter, again.RetryAfter)
	})
}

// What cannot be waited for is an error before any SQL.
func TestWaitThatIsWrong(t *testing.T) {
	t.Parallel()
	b, w := setupCounted(t)
	none := ratelimit.Define("none", ratelimit.TokenBucket{Rate: 1, Period: time.Hour, MaxReserved: ratelimit.NoReservations})
	sliding := ratelimit.Define("sliding", ratelimit.SlidingWindow{Rate: 5, Period: time.Minute})
	tx := b.begin(t, pgx.ReadCommitted)
	require.Zero(t, w.count(func() {
		_, err := b.limiter.WithTx(tx).Wait(t.Context(), roomy.For("a"))
		require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
		require.ErrorContains(t, err, "would keep its rows locked while it sleeps; call Reserve there")
		for _, limit := range []ratelimit.Limit{none, sliding} {
			_, err := b.limiter.Wait(t.Context(), limit.For("a"))
			require.ErrorIs(t, err, ratelimit.ErrNoReservations)
		}
	}))
	requireAllowed(t, taking(roomy.For("a")), b.limiter.WithTx(tx))
	require.NoError(t, tx.Commit(t.Context()))
	owed := ratelimit.Define("owed", ratelimit.TokenBucket{Rate: 1, Period: time.Hour, MaxReserved: 1})
	owe(t, b.limiter, owed.For("a"))
	d, err := b.limiter.Wait(t.Context(), owed.For("a"))
	require.NoError(t, err)
	require.False(t, d.Allowed, "no more may be owed")
	require.InDelta(t, time.Hour, d.RetryAfter, float64(time.Minute))
}

// If the database's clock is slower than the process's, or if the limit is paused, Wait sleeps again: it returns when the
// database's clock reaches the moment.
func TestWaitSleepsOnUntilTheDatabaseSays(t *testing.T) {
	t.Parallel()
	b := setup(t)
	clock := &clock{}
	clock.set(clockNoon)
	limiter := b.with(t, ratelimit.Config{AsOf: clock.now})
	limit := ratelimit.Define("drift", ratelimit.TokenBucket{Rate: 5, Period: time.Second, Capacity: 1})
	takeAll(t, limiter, limit.Global())
	done := make(chan error, 1)
	go func() {
		_, err := limiter.Wait(t.Context(), limit.Global())
		done <- err
	}()
	eventually(t, "it has reserved", func() bool { return len(b.reserved(t)) == 1 })
	before := xact(t, b)
	eventually(t, "it has come back to ask, and sleeps on", func() bool { return xact(t, b) != before })
	select {
	case err := <-done:
		require.Fail(t, "it returned before its moment", "%v", err)
	default:
	}
	require.Nil(t, b.reserved(t)[0].StartedUs)
	clock.set(clockNoon.Add(200 * time.Millisecond))
	require.NoError(t, <-done)
	require.Equal(t, "settled", b.reserved(t)[0].State)
}

// xact returns which transaction has written the reservation last.
func xact(t *testing.T, b *bundle) (id string) {
	t.Helper()
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT xmin::text FROM ratelimit.reservations").Scan(&id))
	return id
}

// The reservation of a process that died while it waited is ended by Expire a minute after its moment, and gives back.
func TestWaitOfAProcessThatDiedIsGivenBack(t *testing.T) {
	t.Parallel()
	s, cutter := newCutStand(t)
	clock := &clock{}
	clock.set(clockNoon)
	limiter, outside := s.with(t, ratelimit.Config{AsOf: clock.now}), s.outside.with(t, ratelimit.Config{AsOf: clock.now})
	takeAll(t, limiter, queued.Global())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := limiter.Wait(ctx, queued.Global())
		done <- err
	}()
	eventually(t, "it has reserved", func() bool { return len(s.outside.reserved(t)) == 1 })
	require.True(t, s.outside.reserved(t)[0].Release)
	cutter.arm("begin", cutRequest, 1000)
	cancel()
	err := <-done
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "what it reserved stays so until Expire ends it")
	require.InDelta(t, -1, s.outside.held(t, "queued", ""), 0.01)
	clock.set(clockNoon.Add(ratelimit.Day + time.Minute - time.Second))
	ended, err := outside.Expire(t.Context())
	require.NoError(t, err)
	require.Zero(t, ended)
	clock.set(clockNoon.Add(ratelimit.Day + time.Minute + time.Second))
	ended, err = outside.Expire(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, ended)
	outside = s.outside.with(t, ratelimit.Config{AsOf: clock.now})
	v, err := outside.Value(t.Context(), queued.Global())
	require.NoError(t, err)
	require.InDelta(t, 1, v.Tokens, 0.01)
}

// An answer to COMMIT that is lost leaves it open whether there is a reservation: Wait cancels it in either case.
func TestWaitWhoseCommitIsUnknownLeavesNothingOwed(t *testing.T) {
	t.Parallel()
	for _, side := range []cut{cutRequest, cutAnswer} {
		t.Run(fmt.Sprint(side), func(t *testing.T) {
			t.Parallel()
			s, cutter := newCutStand(t)
			takeAll(t, s.limiter, queued.Global())
			cutter.arm("commit\x00", side, 1) // and not the BEGIN, which says READ COMMITTED
			_, err := s.limiter.Wait(t.Context(), queued.Global())
			require.ErrorIs(t, err, ratelimit.ErrCommitUnknown)
			for _, r := range s.outside.reserved(t) {
				require.Equal(t, "cancelled", r.State)
			}
			require.InDelta(t, 0, s.outside.held(t, "queued", ""), 0.01)
		})
	}
}

// CheckReserve says what Reserve answers at the same instant, and takes nothing.
func TestCheckReserveAgreesWithReserve(t *testing.T) {
	t.Parallel()
	d := setup(t).desk(t, ratelimit.Config{StaleAfter: time.Minute})
	limits := []ratelimit.Limit{
		ratelimit.Define("tokens", ratelimit.TokenBucket{Rate: 7, Period: 3 * time.Second, Capacity: 5, MaxReserved: 12}),
		ratelimit.Define("windows", ratelimit.FixedWindow{Rate: 3, Period: 2 * time.Second, Capacity: 6}),
		ratelimit.Define("rows", ratelimit.TokenBucket{Rate: 9, Period: 2 * time.Second, Capacity: 8, Shards: 4, MaxReserved: 10}),
	}
	random, refused, owed := testsize.Rand(t), 0, 0
	now := time.Duration(0)
	for i := range 400 {
		now += time.Duration(random.IntN(900_000)) * time.Microsecond
		d.at(now)
		var requests []ratelimit.Request
		for _, j := range random.Perm(len(limits))[:1+random.IntN(len(limits))] {
			requests = append(requests, limits[j].For("a").Cost(float64(random.IntN(5))))
		}
		before := d.rows(t, "")
		checked, err := d.limiter.CheckReserve(t.Context(), requests...)
		require.NoError(t, err)
		require.Equal(t, before, d.rows(t, ""))
		var inTx ratelimit.Reservation
		require.NoError(t, d.limiter.InTx(t.Context(), func(tx pgx.Tx) (err error) {
			inTx, err = d.limiter.WithTx(tx).CheckReserve(t.Context(), requests...)
			return err
		}))
		require.Equal(t, checked, inTx)
		reserved, err := d.limiter.Reserve(t.Context(), requests...)
		require.NoError(t, err)
		require.Empty(t, checked.ID)
		require.Equal(t, [...]any{reserved.Allowed, reserved.RetryAfter, reserved.At, reserved.ReadyAt, reserved.StaleAt},
			[...]any{checked.Allowed, checked.RetryAfter, checked.At, checked.ReadyAt, checked.StaleAt}, "call %d: %v", i, requests)
		if !reserved.Allowed {
			refused++
		} else if reserved.Delay() > 0 {
			owed++
		}
	}
	t.Logf("%d refused, %d ready later", refused, owed)
	require.Positive(t, min(refused, owed))
}
