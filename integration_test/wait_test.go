package integration_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/take"
)

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

// The reservation of a process that died while it waited is ended by Expire, as Config says.
func TestTheWaitOfADeadProcessReturnsItsTokens(t *testing.T) {
	t.Parallel()
	s, cutter := newCutStand(t)
	clock := &clock{}
	clock.set(clockNoon)
	config := ratelimit.Config{AsOf: clock.now, ExpireAfter: time.Minute, ReleaseExpired: true}
	limiter, outside := s.with(t, config), s.outside.with(t, config)
	takeAll(t, limiter, queued.Global())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- errOf(take.Wait(ctx, limiter, queued.Global())) }()
	eventually(t, "it has reserved", func() bool { return len(s.outside.reserved(t)) == 1 })
	require.True(t, s.outside.reserved(t)[0].Release)
	cutter.arm("settle_1", cutRequest, 1000) // each new connection prepares it
	cancel()
	err := <-done
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "its tokens stay reserved until Expire ends the reservation")
	require.InDelta(t, -1, s.outside.held(t, "queued", ""), 0.01)
	for after, want := range []int{0, 1} { // seconds after the minute has passed
		clock.set(clockNoon.Add(ratelimit.Day + time.Minute + time.Duration(2*after-1)*time.Second))
		ended, err := outside.Expire(t.Context())
		require.NoError(t, err)
		require.Equal(t, want, ended)
	}
	require.InDelta(t, 1, tokens(t, s.outside.with(t, ratelimit.Config{AsOf: clock.now}), queued.Global()), 0.01)
}

// A crowd that waits for one limit queues: no transaction conflicts and is retried, at reserving or at cancelling. No
// caller remains in the queue, also if the calls are over other limits, too.
func TestManyWaitersAreServedInOrder(t *testing.T) {
	t.Parallel()
	for name, config := range map[string]ratelimit.Config{"Batches": {}, "NoBatching": {NoBatching: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const callers = 50
			var undone atomic.Int64 // transactions
			b := setup(t, func(c *pgxpool.Config) {
				c.MaxConns = 16
				c.ConnConfig.Tracer = tracing(func(sql string) {
					if sql == "rollback" {
						undone.Add(1)
					}
				})
			})
			b.limiter = b.with(t, config)
			takeAll(t, b.limiter, queued.Global())
			var waits, takes []*asker
			for i := range callers {
				requests := []ratelimit.Request{queued.Global()}
				if i%2 == 0 {
					requests = append(requests, roomy.For(fmt.Sprint(i%7)))
				}
				waits = append(waits, startAsking(t, func(ctx context.Context) (bool, error) { return false, errOf(take.Wait(ctx, b.limiter, requests...)) }))
				takes = append(takes, ask(t, b.limiter, other.For(fmt.Sprint(i))))
			}
			requireAllAllowed(t, takes...)
			eventually(t, "all have reserved", func() bool { return len(b.reserved(t)) == callers })
			require.InDelta(t, -callers, b.held(t, "queued", ""), 0.01)
			for _, a := range waits {
				a.cancel()
			}
			for _, a := range waits {
				<-a.ended
				require.ErrorIs(t, a.err, context.Canceled)
			}
			for _, r := range b.reserved(t) {
				require.Equal(t, "cancelled", r.State)
			}
			require.InDelta(t, 0, b.held(t, "queued", ""), 0.01)
			require.Zero(t, undone.Load())
		})
	}
}

// Wait returns when the database's clock reaches its moment, however fast the clock of the process is: until then it
// asks, and sleeps again. If another caller ends its reservation, Wait learns that when it asks. It is not admitted if
// the tokens were returned, nor before its moment if they are paid. It also returns if its context ends meanwhile.
func TestWaitSleepsByTheDatabasesClock(t *testing.T) {
	t.Parallel()
	type sleeper struct {
		*desk
		id     string
		giveUp context.CancelFunc
	}
	limit := ratelimit.Define("drift", ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: 1})
	settle := func(t *testing.T, w sleeper) error { t.Helper(); return w.limiter.Settle(t.Context(), w.id) }
	atItsMoment := func(w sleeper) { w.at(time.Second) }
	for name, test := range map[string]struct {
		end   func(t *testing.T, w sleeper) error // while it sleeps; nil: nobody ends its reservation
		then  func(w sleeper)                     // after it has asked again; nil: it returns by itself
		want  error
		state string
		held  float64
	}{
		"NobodyEndsIt": {nil, atItsMoment, nil, "settled", -1},
		"Settled":      {settle, atItsMoment, nil, "settled", -1}, // it paid once
		"Cancelled": {func(t *testing.T, w sleeper) error {
			t.Helper()
			return w.limiter.Cancel(t.Context(), w.id)
		}, nil, ratelimit.ErrReservationEnded, "cancelled", 0},
		"SettledAndGivenUp": {settle, func(w sleeper) { w.giveUp() }, context.Canceled, "settled", -1},
		"Expired": {func(t *testing.T, w sleeper) error { // when there are tokens for it
			t.Helper()
			w.at(2 * ratelimit.Day)
			return errOf(w.limiter.Expire(t.Context()))
		}, nil, nil, "settled", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, giveUp := context.WithCancel(t.Context())
			defer giveUp()
			var asked atomic.Int64
			b := setup(t, func(c *pgxpool.Config) {
				c.ConnConfig.Tracer = tracing(func(sql string) {
					if strings.Contains(sql, "start_1") {
						asked.Add(1)
					}
				})
			})
			w := sleeper{desk: b.desk(t, ratelimit.Config{ReleaseExpired: true}), giveUp: giveUp}
			takeAll(t, w.limiter, limit.Global())
			done := make(chan error, 1)
			go func() { done <- errOf(take.Wait(ctx, w.limiter, limit.Global())) }()
			eventually(t, "it has reserved", func() bool { return len(w.reserved(t)) == 1 })
			require.NoError(t, w.pool.QueryRow(t.Context(), "SELECT id::text FROM ratelimit.reservations").Scan(&w.id))
			if test.end != nil {
				require.NoError(t, test.end(t, w))
			}
			if test.then != nil {
				before := asked.Load()
				eventually(t, "it asks, and sleeps on", func() bool { return asked.Load() > before })
				require.Empty(t, done, "it returned before its moment")
				test.then(w)
			}
			require.ErrorIs(t, <-done, test.want)
			require.Equal(t, test.state, w.reserved(t)[0].State)
			require.InDelta(t, test.held, w.held(t, "drift", ""), 0.01)
		})
	}
}
