package integration_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// outcome is what there is of a reservation or a lease, and of the tokens of its key.
type outcome struct {
	State   string // "" when there is no reservation
	Started bool
	Calls   int // tokens taken
	Roomy   int
	Slots   int // that are held
}

// outcomeOf returns the state of the reservation for a key.
func (s *stand) outcomeOf(t *testing.T, key string) (o outcome) {
	t.Helper()
	require.NoError(t, s.outside.pool.QueryRow(t.Context(), `
		SELECT coalesce(max(state), ''), coalesce(bool_or(started_us IS NOT NULL), false),
			(SELECT coalesce(round($2 - sum(value)), 0)::integer FROM ratelimit.buckets WHERE name = 'calls' AND key = $1),
			(SELECT coalesce(round(1e6 - sum(value)), 0)::integer FROM ratelimit.buckets WHERE name = 'roomy' AND key = $1)
		FROM ratelimit.reservations WHERE key = $1`, key, callsCapacity).Scan(&o.State, &o.Started, &o.Calls, &o.Roomy))
	o.Slots = 3 - int(tokens(t, s.outside.limiter, brokenSlots.For(key)))
	return o
}

var brokenSlots = daylong("slots", 3)

// brokenCalls are calls with a transaction of their own, on two calls and one roomy, or on two slots and one roomy.
var brokenCalls = map[string]struct {
	prepare       func(ctx context.Context, l *ratelimit.Limiter, requests []ratelimit.Request) (id string, err error)
	call          func(ctx context.Context, l *ratelimit.Limiter, id string, requests []ratelimit.Request) error
	before, after outcome
	once          bool // whether a statement without COMMIT decides, or tries to
}{
	"Reserve": {nil, func(ctx context.Context, l *ratelimit.Limiter, _ string, requests []ratelimit.Request) error {
		return errOf(l.Reserve(ctx, requests[:2]...))
	}, outcome{}, outcome{State: "open", Calls: 2, Roomy: 1}, true},
	"ReserveOne": {nil, func(ctx context.Context, l *ratelimit.Limiter, _ string, requests []ratelimit.Request) error {
		return errOf(l.Reserve(ctx, requests[0]))
	}, outcome{}, outcome{State: "open", Calls: 2}, true},
	"SettleOne": {reserveOneToBreak, func(ctx context.Context, l *ratelimit.Limiter, id string, requests []ratelimit.Request) error {
		return l.Settle(ctx, id, requests[0].Cost(3))
	}, outcome{State: "open", Calls: 2}, outcome{State: "settled", Calls: 3}, true},
	"CancelOne": {reserveOneToBreak, func(ctx context.Context, l *ratelimit.Limiter, id string, _ []ratelimit.Request) error {
		return l.Cancel(ctx, id)
	}, outcome{State: "open", Calls: 2}, outcome{State: "cancelled"}, true},
	"Start": {reserveToBreak, func(ctx context.Context, l *ratelimit.Limiter, id string, _ []ratelimit.Request) error {
		return errOf(l.Start(ctx, id))
	}, outcome{State: "open", Calls: 2, Roomy: 1}, outcome{State: "open", Started: true, Calls: 2, Roomy: 1}, true},
	"Settle": {startToBreak, func(ctx context.Context, l *ratelimit.Limiter, id string, requests []ratelimit.Request) error {
		return l.Settle(ctx, id, requests[0].Cost(3), requests[1].Cost(4))
	}, outcome{State: "open", Started: true, Calls: 2, Roomy: 1}, outcome{State: "settled", Started: true, Calls: 3, Roomy: 4}, true},
	"Cancel": {startToBreak, func(ctx context.Context, l *ratelimit.Limiter, id string, _ []ratelimit.Request) error {
		return l.Cancel(ctx, id)
	}, outcome{State: "open", Started: true, Calls: 2, Roomy: 1}, outcome{State: "cancelled", Started: true}, true},
	"Renew": {startToBreak, func(ctx context.Context, l *ratelimit.Limiter, id string, _ []ratelimit.Request) error {
		return errOf(l.Renew(ctx, id))
	}, outcome{State: "open", Started: true, Calls: 2, Roomy: 1}, outcome{State: "open", Calls: 4, Roomy: 2}, true},
	"AcquireInTx": {nil, func(ctx context.Context, l *ratelimit.Limiter, _ string, requests []ratelimit.Request) error {
		once := false // or InTx would try again
		return l.InTx(ctx, func(tx pgx.Tx) error {
			if once {
				return errUndone
			}
			once = true
			_, err := l.WithTx(tx).Acquire(ctx, requests[1:]...)
			return err
		})
	}, outcome{}, outcome{Roomy: 1, Slots: 2}, false},
}

func reserveToBreak(ctx context.Context, l *ratelimit.Limiter, requests []ratelimit.Request) (string, error) {
	r, err := l.Reserve(ctx, requests[:2]...)
	return r.ID, err
}

func reserveOneToBreak(ctx context.Context, l *ratelimit.Limiter, requests []ratelimit.Request) (string, error) {
	r, err := l.Reserve(ctx, requests[0])
	return r.ID, err
}

func startToBreak(ctx context.Context, l *ratelimit.Limiter, requests []ratelimit.Request) (string, error) {
	r, err := l.Reserve(ctx, requests[:2]...)
	if err == nil {
		_, err = l.Start(ctx, r.ID)
	}
	return r.ID, err
}

// breaks are the faults at a message.
var breaks = map[string]cut{
	"TheRequestIsLost": cutRequest, "HalfOfItArrives": cutHalfRequest, "TheAnswerIsLost": cutAnswer, "HalfOfTheAnswerArrives": cutHalfAnswer, "TheContextEnds": -1,
}

// breakAt makes the n-th request from now on break, or the context end there.
func (c *cutter) breakAt(t *testing.T, n int, side cut) (ctx context.Context, cancel func()) {
	t.Helper()
	ctx, cancel = context.WithCancel(t.Context())
	if side < 0 {
		c.armAt(n, 0, cancel)
	} else {
		c.armAt(n, side, nil)
	}
	return ctx, cancel
}

// A call with a transaction of its own sends BEGIN with its first statement, and COMMIT with its last. Wherever a
// message or its answer is lost, or the context ends, the outcome is as before the call, or as after it. If COMMIT may
// have arrived, the error is ErrCommitUnknown, and the call is not sent again. With another error nothing was written.
func TestACallWithABrokenConnectionIsAllOrNothing(t *testing.T) {
	t.Parallel()
	for _, mode := range execModes {
		for fault, side := range breaks {
			t.Run(mode.String()+"/"+fault, func(t *testing.T) {
				t.Parallel()
				representative(t, mode.String(), pgx.QueryExecModeCacheStatement.String())
				representative(t, fault, "TheRequestIsLost", "TheAnswerIsLost", "TheContextEnds")
				cutter := &cutter{}
				s := newStand(t, cutter.on, oneConnection, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode })
				require.NoError(t, s.outside.limiter.Credit(t.Context(), calls.For("first"))) // stores the fingerprint
				takeAll(t, s.limiter, calls.For("first").Cost(1))                             // learns the layout of the tables
				for name, test := range brokenCalls {
					unknown := 0
					for n, reached := 1, true; reached; n++ {
						key := fmt.Sprint(name, n)
						requests := []ratelimit.Request{calls.For(key).Cost(2), roomy.For(key), brokenSlots.For(key).Cost(2)}
						var id string
						if test.prepare != nil {
							made, err := test.prepare(t.Context(), s.outside.limiter, requests)
							require.NoError(t, err)
							id = made
						}
						ctx, cancel := cutter.breakAt(t, n, side)
						err := test.call(ctx, s.limiter, id, requests)
						cancel()
						reached = cutter.seen() >= n
						cutter.arm("", 0, 0)
						want := test.before
						isUnknown := errors.Is(err, ratelimit.ErrCommitUnknown)
						if isUnknown {
							unknown++
						}
						if err == nil || isUnknown && (side == cutAnswer || side == cutHalfAnswer) {
							want = test.after
						}
						got := s.outcomeOf(t, key)
						if test.once && isUnknown && got == test.before { // it was lost when the statement was prepared, or has left it undecided
							want = test.before
						}
						require.Equal(t, want, got, "%s, message %d: %v", name, n, err)
						if !reached {
							require.NoError(t, err)
							require.True(t, test.once || n > 2, "begin with the lock, and commit with the save")
						}
					}
					if side >= 0 && !test.once {
						require.Equal(t, 1, unknown, "%s: one message holds COMMIT", name)
					}
				}
				s.requireHealthy(t)
			})
		}
	}
}

// While the table of reservations is locked, for example by CREATE INDEX, Reserve waits, alone and in batches. A
// statement that makes the rows of new buckets must not leave its short lock_timeout to the statements behind it.
func TestReserveWaitsForTheTableOfReservations(t *testing.T) {
	t.Parallel()
	b := setup(t)
	sharded := hoard(16)
	sharded.Shards = 8
	limits := []ratelimit.Limit{ratelimit.Define("table/a", hoard(10)), ratelimit.Define("table/b", hoard(10)), ratelimit.Define("table/c", sharded)}
	for name, chosen := range map[string][]ratelimit.Limit{"One": limits[:1], "Two": limits[:2], "TwoOneSharded": limits[1:], "Sharded": limits[2:]} {
		for _, callers := range []int{1, 5} {
			holder := b.begin(t, pgx.ReadCommitted)
			_, err := holder.Exec(t.Context(), "LOCK TABLE ratelimit.reservations IN SHARE MODE")
			require.NoError(t, err)
			done := make(chan error, callers)
			for caller := range callers {
				var requests []ratelimit.Request
				for _, limit := range chosen {
					requests = append(requests, limit.For(fmt.Sprint(name, callers, caller)))
				}
				go func() {
					_, err := b.limiter.Reserve(t.Context(), requests...)
					done <- err
				}()
			}
			eventually(t, "a call has waited for 20 ms, or has failed", func() bool {
				var waits bool
				require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity
					WHERE datname = current_database() AND wait_event_type = 'Lock' AND clock_timestamp() - query_start > '20 ms')`).Scan(&waits))
				return waits || len(done) > 0
			})
			require.NoError(t, holder.Rollback(t.Context()))
			for range callers {
				require.NoError(t, <-done, "%s, %d callers", name, callers)
			}
		}
	}
}

// If a connection breaks while its transaction waits or has its turn, InTx retries. If it breaks at COMMIT, InTx does
// not.
func TestASharedTurnOnAConnectionThatBreaks(t *testing.T) {
	t.Parallel()
	hot := ratelimit.Define("hot", hoard(100_000)).Global()
	for request, want := range map[string]error{
		"pg_try_advisory_xact_lock": nil, "bucket": nil, "commit": ratelimit.ErrCommitUnknown,
	} {
		for _, side := range []cut{cutRequest, cutAnswer} {
			t.Run(fmt.Sprintf("%s %d", request, side), func(t *testing.T) {
				t.Parallel()
				cutter := &cutter{}
				b := setup(t, cutter.on)
				take := func() error { return world.InTurn(t.Context(), b.limiter, hot, func() error { return nil }) }
				require.NoError(t, take())
				cutter.arm(request, side, 1)
				require.ErrorIs(t, take(), want)
				cutter.arm("", 0, 0)
				eventually(t, "no lock is held", func() bool {
					return b.count(t, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted
						AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`) == 0
				})
				require.NoError(t, take())
				taken := 3.0
				if want != nil && side == cutRequest {
					taken--
				}
				require.InDelta(t, 100_000-taken, b.held(t, "hot", ""), 0.01)
			})
		}
	}
}
