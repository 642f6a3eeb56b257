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
)

// interloper is a tracer that has something done to a row just before a statement is sent that writes it: by somebody else, and
// after it was read.
type interloper struct {
	deed  atomic.Pointer[func()]
	swaps atomic.Int64
	locks atomic.Int64 // transactions that were begun, to lock the row
}

func (i *interloper) on(level pgx.TxIsoLevel) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) {
		c.ConnConfig.Tracer = i
		c.ConnConfig.RuntimeParams["default_transaction_isolation"] = string(level)
	}
}

func (i *interloper) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if strings.HasPrefix(data.SQL, "-- Write one row in a transaction of the statement's own") { // bucket_swap.sql, or bucket_make.sql
		i.swaps.Add(1)
		if deed := i.deed.Swap(nil); deed != nil {
			(*deed)()
		}
	}
	return ctx
}

func (i *interloper) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (i *interloper) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	if strings.HasPrefix(data.Batch.QueuedQueries[0].SQL, "begin") {
		i.locks.Add(1)
	}
	return ctx
}

func (i *interloper) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (i *interloper) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// swapStand is a Limiter whose swaps an interloper comes before, on sessions of a default isolation level.
type swapStand struct {
	*bundle
	outside *bundle // whom no interloper watches
	*interloper
}

// onSwaps runs a test at each level that sessions may begin their transactions at by default.
func onSwaps(t *testing.T, run func(t *testing.T, s *swapStand)) {
	t.Helper()
	fastPathOnly(t, "the general path locks the row first")
	for _, level := range levels {
		t.Run(level.name, func(t *testing.T) {
			t.Parallel()
			i := &interloper{}
			inside := setup(t, i.on(level.level))
			acquire(t, inside.limiter, daylong("first", 1).For("key")) // of which a Limiter begins a transaction more
			run(t, &swapStand{inside, openOutside(t, inside.pool.Config().ConnString()), i})
		})
	}
}

// meanwhile makes a call that swaps, before which the deed is done, and returns how often it locked the row afterwards.
func (s *swapStand) meanwhile(t *testing.T, deed, call func()) (locks int64) {
	t.Helper()
	s.deed.Store(&deed)
	s.swaps.Store(0)
	s.locks.Store(0)
	call()
	require.EqualValues(t, 1, s.swaps.Load(), "the call has sent the statement")
	require.Nil(t, s.deed.Load())
	return s.locks.Load()
}

// An Acquire whose row somebody has written since it was read decides again, on what is there, and undoes nothing of it.
func TestAnAcquireThatWasOvertakenDecidesAgain(t *testing.T) {
	t.Parallel()
	jobs := daylong("jobs", 3)
	slides := ratelimit.Define("jobs", ratelimit.SlidingWindow{Rate: 3, Period: ratelimit.Day})
	exec := func(sql string) func(*testing.T, *swapStand, string, []ratelimit.Lease) {
		return func(t *testing.T, s *swapStand, key string, _ []ratelimit.Lease) {
			t.Helper()
			s.outside.exec(t, sql, key)
		}
	}
	acquires := func(slots float64) func(*testing.T, *swapStand, string, []ratelimit.Lease) {
		return func(t *testing.T, s *swapStand, key string, _ []ratelimit.Lease) {
			t.Helper()
			acquire(t, s.outside.limiter, jobs.For(key).Cost(slots))
		}
	}
	onSwaps(t, func(t *testing.T, s *swapStand) {
		t.Helper()
		for name, test := range map[string]struct {
			held  int // leases of one slot each, before; -1: there is no row
			deed  func(t *testing.T, s *swapStand, key string, held []ratelimit.Lease)
			free  float64 // after the call
			room  bool    // whether the call is allowed
			locks int64
		}{
			"TheRowIsMade":        {-1, acquires(1), 1, true, 1},
			"TheRowIsMadeAndFull": {-1, acquires(3), 0, false, 1},
			"AnotherTakesOne":     {0, acquires(1), 1, true, 1},
			"AnotherTakesAll":     {1, acquires(2), 0, false, 1},
			"OneIsReleased": {2, func(t *testing.T, s *swapStand, _ string, held []ratelimit.Lease) {
				t.Helper()
				require.NoError(t, s.outside.limiter.Release(t.Context(), held[0].ID))
			}, 1, true, 1},
			"AllAreReset": {2, func(t *testing.T, s *swapStand, key string, _ []ratelimit.Lease) {
				t.Helper()
				require.NoError(t, s.outside.limiter.Reset(t.Context(), jobs.For(key)))
			}, 2, true, 1},
			"OnlyTheLeasesChange": {1, exec(`UPDATE ratelimit.buckets SET leases[4] = 2 WHERE key = $1`), 0, true, 1},
			"OnlyTheFenceChanges": {0, exec(`UPDATE ratelimit.buckets SET leases = ARRAY[3000000000000000] WHERE key = $1`), 2, true, 1},
			"OnlyTheValueChanges": {1, exec(`UPDATE ratelimit.buckets SET value = value - 1 WHERE key = $1`), 1, true, 1},
			"OnlyTheInstantMoves": {1, exec(`UPDATE ratelimit.buckets SET ts = ts + 1 WHERE key = $1`), 1, true, 1},
			"OnlyAnotherKindCame": {1, exec(`UPDATE ratelimit.buckets SET taken = '{60000000,2,1,0}' WHERE key = $1`), 1, true, 1},
			"AnotherKindTakes": {0, func(t *testing.T, s *swapStand, key string, _ []ratelimit.Lease) {
				t.Helper()
				takeOne(t, s.outside.limiter, slides.For(key))
			}, 2, true, 1},
			"TheRowIsPruned": {0, exec(`DELETE FROM ratelimit.buckets WHERE key = $1`), 2, true, 1},
			"OneIsReleasedAndTheRowPruned": {1, func(t *testing.T, s *swapStand, key string, held []ratelimit.Lease) {
				t.Helper()
				require.NoError(t, s.outside.limiter.Release(t.Context(), held[0].ID))
				s.outside.exec(t, `DELETE FROM ratelimit.buckets WHERE key = $1`, key)
			}, 2, true, 1},
			"NobodyMakesTheRow":    {-1, func(*testing.T, *swapStand, string, []ratelimit.Lease) {}, 2, true, 0},
			"NobodyComes":          {1, func(*testing.T, *swapStand, string, []ratelimit.Lease) {}, 1, true, 0},
			"NobodyComesToTheLast": {2, func(*testing.T, *swapStand, string, []ratelimit.Lease) {}, 0, true, 0},
		} {
			t.Run(name, func(t *testing.T) { // not parallel: they share the interloper
				key := t.Name()
				var held []ratelimit.Lease
				if test.held == 0 {
					require.NoError(t, s.outside.limiter.Reset(t.Context(), jobs.For(key)))
				}
				for range test.held {
					held = append(held, acquire(t, s.outside.limiter, jobs.For(key)))
				}
				var lease ratelimit.Lease
				var highest int64
				locks := s.meanwhile(t, func() {
					test.deed(t, s, key, held)
					require.NoError(t, s.outside.pool.QueryRow(t.Context(), `SELECT coalesce(max(leases[1]), 0) FROM ratelimit.buckets WHERE key = $1`, key).Scan(&highest))
				}, func() {
					var err error
					lease, err = s.limiter.Acquire(t.Context(), jobs.For(key))
					require.NoError(t, err)
				})
				require.Equal(t, test.room, lease.Allowed)
				require.Equal(t, test.locks, locks)
				requireFree(t, s.outside.limiter, test.free, jobs.For(key))
				if !test.room {
					require.Positive(t, lease.RetryAfter)
					return
				}
				require.Greater(t, lease.Fence, highest)
				require.NoError(t, s.outside.limiter.Release(t.Context(), lease.ID))
				requireFree(t, s.outside.limiter, test.free+1, jobs.For(key))
			})
		}
	})
}

// A swap that waits for somebody's transaction decides on what that leaves, whether it commits or not.
func TestAnAcquireThatWaitedDecidesAgain(t *testing.T) {
	t.Parallel()
	jobs := daylong("jobs", 2)
	onSwaps(t, func(t *testing.T, s *swapStand) {
		t.Helper()
		for _, rowExists := range []bool{false, true} {
			for name, test := range map[string]struct {
				slots         float64 // that the transaction takes
				commits, room bool
				free          float64 // after the call
			}{"Room": {1, true, true, 0}, "NoRoom": {2, true, false, 0}, "RolledBack": {2, false, true, 1}} {
				t.Run(fmt.Sprintf("RowExists=%v/%s", rowExists, name), func(t *testing.T) { // not parallel: waiting counts all
					job := jobs.For(t.Name())
					if rowExists {
						require.NoError(t, s.limiter.Reset(t.Context(), job))
					}
					tx := s.outside.begin(t, pgx.ReadCommitted)
					acquire(t, s.outside.limiter.WithTx(tx), job.Cost(test.slots))
					told := make(chan ratelimit.Lease, 1)
					failed := make(chan error, 1)
					go func() {
						lease, err := s.limiter.Acquire(t.Context(), job)
						told <- lease
						failed <- err
					}()
					eventually(t, "the call waits for the row", func() bool { return waiting(t, s.outside.pool) == 1 })
					if test.commits {
						require.NoError(t, tx.Commit(t.Context()))
					} else {
						require.NoError(t, tx.Rollback(t.Context()))
					}
					lease := <-told
					require.NoError(t, <-failed)
					require.Equal(t, test.room, lease.Allowed)
					requireFree(t, s.outside.limiter, test.free, job)
				})
			}
		}
	})
}

// So does a RenewLease, and a Release: they keep what came between, and are told of a lease that is lost.
func TestALeaseThatWasChangedMeanwhile(t *testing.T) {
	t.Parallel()
	jobs := daylong("jobs", 3)
	deeds := map[string]struct {
		do   func(t *testing.T, b *bundle, job ratelimit.Request, id string)
		lost bool
		free float64 // while the lease is held
	}{
		"AnotherAcquires": {func(t *testing.T, b *bundle, job ratelimit.Request, _ string) {
			t.Helper()
			acquire(t, b.limiter, job)
		}, false, 1},
		"ItIsReleased": {func(t *testing.T, b *bundle, _ ratelimit.Request, id string) {
			t.Helper()
			require.NoError(t, b.limiter.Release(t.Context(), id))
		}, true, 3},
		"ItIsReleasedAndTheRowPruned": {func(t *testing.T, b *bundle, _ ratelimit.Request, id string) {
			t.Helper()
			require.NoError(t, b.limiter.Release(t.Context(), id))
			b.exec(t, `DELETE FROM ratelimit.buckets WHERE name = 'jobs' AND key = $1`, t.Name())
		}, true, 3},
		"ItIsReset": {func(t *testing.T, b *bundle, job ratelimit.Request, _ string) {
			t.Helper()
			require.NoError(t, b.limiter.Reset(t.Context(), job))
			acquire(t, b.limiter, job.Cost(2))
		}, true, 1},
		"ItIsRenewed": {func(t *testing.T, b *bundle, _ ratelimit.Request, id string) {
			t.Helper()
			_, err := b.limiter.RenewLease(t.Context(), id)
			require.NoError(t, err)
		}, false, 2},
	}
	onSwaps(t, func(t *testing.T, s *swapStand) {
		t.Helper()
		for name, deed := range deeds {
			for _, release := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/Release=%v", name, release), func(t *testing.T) { // not parallel: they share the interloper
					job := jobs.For(t.Name())
					lease := acquire(t, s.limiter, job)
					var renewed ratelimit.Lease
					var err error
					locks := s.meanwhile(t, func() { deed.do(t, s.outside, job, lease.ID) }, func() {
						if release {
							err = s.limiter.Release(t.Context(), lease.ID)
						} else {
							renewed, err = s.limiter.RenewLease(t.Context(), lease.ID)
						}
					})
					require.EqualValues(t, 1, locks)
					free := deed.free
					if deed.lost {
						require.ErrorIs(t, err, ratelimit.ErrLeaseLost)
					} else {
						require.NoError(t, err)
					}
					if release && !deed.lost {
						free++
					}
					requireFree(t, s.outside.limiter, free, job)
					if !release && !deed.lost {
						v, err := s.limiter.Value(t.Context(), job)
						require.NoError(t, err)
						require.InDelta(t, deed.free, v.At(lease.Until), 0, "it was extended")
						require.InDelta(t, 3, v.At(renewed.Until.Add(time.Second)), 0)
					}
				})
			}
		}
	})
}
