package integration_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// outcome is what there is of a reservation, and of the tokens of its key.
type outcome struct {
	State   string // "" when there is no reservation
	Started bool
	Calls   int // tokens taken
	Roomy   int
}

// outcomeOf returns the state of the reservation for a key.
func (s *stand) outcomeOf(t *testing.T, key string) (o outcome) {
	t.Helper()
	require.NoError(t, s.outside.pool.QueryRow(t.Context(), `
		SELECT coalesce(max(state), ''), coalesce(bool_or(started_us IS NOT NULL), false),
			(SELECT coalesce(round($2 - sum(value)), 0)::integer FROM ratelimit.buckets WHERE name = 'calls' AND key = $1),
			(SELECT coalesce(round(1e6 - sum(value)), 0)::integer FROM ratelimit.buckets WHERE name = 'roomy' AND key = $1)
		FROM ratelimit.reservations WHERE keys[1] = $1`, key, callsCapacity).Scan(&o.State, &o.Started, &o.Calls, &o.Roomy))
	return o
}

// reservationCalls are the calls on reservations with a transaction of their own: on a started reservation, or on a new one, with
// the state afterwards.
var reservationCalls = map[string]struct {
	call          func(ctx context.Context, limiter *ratelimit.Limiter, id string, requests []ratelimit.Request) error
	makes         bool
	before, after outcome
}{
	"Reserve": {
		call: func(ctx context.Context, limiter *ratelimit.Limiter, _ string, requests []ratelimit.Request) error {
			_, err := limiter.Reserve(ctx, requests...)
			return err
		},
		makes: true, after: outcome{State: "open", Calls: 2, Roomy: 1},
	},
	"Start": {
		call: func(ctx context.Context, limiter *ratelimit.Limiter, id string, _ []ratelimit.Request) error {
			_, err := limiter.Start(ctx, id)
			return err
		},
		before: outcome{State: "open", Calls: 2, Roomy: 1}, after: outcome{State: "open", Started: true, Calls: 2, Roomy: 1},
	},
	"Settle": {
		call: func(ctx context.Context, limiter *ratelimit.Limiter, id string, requests []ratelimit.Request) error {
			return limiter.Settle(ctx, id, requests[0].Cost(3), requests[1].Cost(4))
		},
		before: outcome{State: "open", Started: true, Calls: 2, Roomy: 1}, after: outcome{State: "settled", Started: true, Calls: 3, Roomy: 4},
	},
	"Cancel": {
		call: func(ctx context.Context, limiter *ratelimit.Limiter, id string, _ []ratelimit.Request) error {
			return limiter.Cancel(ctx, id)
		},
		before: outcome{State: "open", Started: true, Calls: 2, Roomy: 1}, after: outcome{State: "cancelled", Started: true},
	},
	"Renew": {
		call: func(ctx context.Context, limiter *ratelimit.Limiter, id string, _ []ratelimit.Request) error {
			_, err := limiter.Renew(ctx, id)
			return err
		},
		before: outcome{State: "open", Started: true, Calls: 2, Roomy: 1}, after: outcome{State: "open", Calls: 4, Roomy: 2},
	},
}

// If a message of a call on a reservation, or its answer, is lost, or the context ends there, the reservation and its tokens stay
// consistent. Both are as before the call, or as after it. With any error except ErrCommitUnknown they are as before.
func TestACallOnAReservationThatBreaksAnywhereLeavesNoHalf(t *testing.T) {
	t.Parallel()
	for name, test := range reservationCalls {
		for fault, side := range map[string]cut{"TheRequestIsLost": cutRequest, "TheAnswerIsLost": cutAnswer, "TheContextEnds": -1} {
			t.Run(name+"/"+fault, func(t *testing.T) {
				t.Parallel()
				representative(t, fault, "TheAnswerIsLost")
				cutter := &cutter{}
				s := newStand(t, cutter.on, oneConnection)
				require.NoError(t, s.outside.limiter.Credit(t.Context(), calls.For("first"))) // stores the fingerprint
				for n := 1; ; n++ {
					key := fmt.Sprint(n)
					requests := []ratelimit.Request{calls.For(key).Cost(2), roomy.For(key)}
					var id string
					if !test.makes {
						r, err := s.outside.limiter.Reserve(t.Context(), requests...)
						require.NoError(t, err)
						id = r.ID
						if test.before.Started {
							_, err = s.outside.limiter.Start(t.Context(), id)
							require.NoError(t, err)
						}
					}
					ctx, cancel := context.WithCancel(t.Context())
					if side < 0 {
						cutter.armAt(n, 0, cancel)
					} else {
						cutter.armAt(n, side, nil)
					}
					err := test.call(ctx, s.limiter, id, requests)
					cancel()
					reached := cutter.seen() >= n
					cutter.arm("", 0, 0)
					switch found := s.outcomeOf(t, key); {
					case err == nil:
						require.Equal(t, test.after, found, "message %d", n)
					case errors.Is(err, ratelimit.ErrCommitUnknown):
						require.Contains(t, []outcome{test.before, test.after}, found, "message %d", n)
					default:
						require.Equal(t, test.before, found, "message %d: %v", n, err)
					}
					if !reached {
						require.NoError(t, err)
						require.Greater(t, n, 2, "begin with the lock, and commit with the save")
						t.Logf("%d messages", n-1)
						break
					}
				}
				s.requireHealthy(t)
			})
		}
	}
}

// The same for a Wait that is cancelled while it sleeps: its reservation is open, or it has taken nothing.
func TestAWaitThatBreaksAnywhereLeavesNoHalf(t *testing.T) {
	t.Parallel()
	for fault, side := range map[string]cut{"TheRequestIsLost": cutRequest, "TheAnswerIsLost": cutAnswer, "TheContextEnds": -1} {
		t.Run(fault, func(t *testing.T) {
			t.Parallel()
			cutter := &cutter{}
			s := newStand(t, cutter.on, oneConnection)
			for n, reached := 1, true; reached; n++ {
				key := fmt.Sprint(n)
				requests := []ratelimit.Request{calls.For(key).Cost(2), roomy.For(key)}
				takeAll(t, s.outside.limiter, calls.For(key))
				ctx, cancel := context.WithCancel(t.Context())
				if side < 0 {
					cutter.armAt(n, 0, cancel)
				} else {
					cutter.armAt(n, side, nil)
				}
				done := make(chan error, 1)
				go func() {
					_, err := s.limiter.Wait(ctx, requests...)
					done <- err
				}()
				var err error
				eventually(t, "it sleeps, or has ended", func() bool {
					select {
					case err = <-done:
						return true
					default:
						return s.outcomeOf(t, key).State == "open"
					}
				})
				cancel()
				if err == nil {
					err = <-done
				}
				reached = cutter.seen() >= n
				cutter.arm("", 0, 0)
				require.Error(t, err)
				switch found := s.outcomeOf(t, key); found.State {
				case "open":
					require.Equal(t, outcome{State: "open", Calls: callsCapacity + 2, Roomy: 1}, found, "message %d", n)
					require.ErrorContains(t, err, "until Expire ends it", "message %d", n)
				default: // none, or it was given back
					require.Equal(t, outcome{State: found.State, Calls: callsCapacity}, found, "message %d: %v", n, err)
				}
			}
			s.requireHealthy(t)
		})
	}
}

// Callers who share a connection are served one after the other, and all of them get it.
func TestReservationsOfACrowdOnOneConnection(t *testing.T) {
	t.Parallel()
	for name, config := range map[string]ratelimit.Config{"Batches": {}, "NoBatching": {NoBatching: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const callers = 20
			s := newStand(t, oneConnection)
			limiter := s.with(t, config)
			requests := []ratelimit.Request{calls.For("ada").Cost(2), roomy.For("ada")}
			require.NoError(t, atonce.Do(callers, func(worker int) error {
				r, err := limiter.Reserve(t.Context(), requests...)
				if err != nil {
					return err
				}
				if _, err := limiter.Start(t.Context(), r.ID); err != nil {
					return err
				}
				switch worker % 3 {
				case 0:
					return limiter.Cancel(t.Context(), r.ID)
				case 1:
					_, err = limiter.Renew(t.Context(), r.ID)
					return err
				}
				return limiter.Settle(t.Context(), r.ID, requests[0].Cost(3))
			}))
			taken := 0
			for worker := range callers {
				taken += []int{0, 4, 3}[worker%3]
			}
			require.Equal(t, taken, s.taken(t))
			require.Len(t, s.outside.reserved(t), callers)
			s.requireHealthy(t)
		})
	}
	t.Run("Wait", func(t *testing.T) {
		t.Parallel()
		const callers = 20
		s := newStand(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
		require.NoError(t, atonce.Do(callers, func(int) error {
			_, err := s.limiter.Wait(t.Context(), turn.Global(), roomy.For("ada"))
			return err
		}))
		require.InDelta(t, 1e6-callers, s.outside.held(t, "roomy", "ada"), 0.01)
		s.requireHealthy(t)
	})
}

// While the table of reservations is locked, for example by CREATE INDEX, Reserve waits, alone and in batches. A statement that makes the
// rows of new buckets must not leave its short lock_timeout to the statements behind it.
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
