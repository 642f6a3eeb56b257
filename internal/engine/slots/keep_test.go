package slots

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/memory"
	"github.com/pgratelimit/pgratelimit/internal/engine/store"
)

// landlord gives leases of a minute, and notes the time of each call.
type landlord struct {
	begun    time.Time
	renewals []time.Duration
	released []time.Duration
	renew    func(ctx context.Context, nth int) error // nil: it renews
	release  error
}

const leaseLength = time.Minute

var errLost = errors.New("the lease is lost")

func (l *landlord) Renew(ctx context.Context, _ string) (Span, error) {
	span := Span{Asked: time.Now(), Length: leaseLength}
	l.renewals = append(l.renewals, time.Since(l.begun))
	if l.renew != nil {
		if err := l.renew(ctx, len(l.renewals)); err != nil {
			return Span{}, err
		}
	}
	return span, nil
}

func (l *landlord) IsLost(err error) bool { return errors.Is(err, errLost) }

func (l *landlord) Lost(cause error) error { return errors.Join(errLost, cause) }

func (l *landlord) Release(context.Context, string) error {
	l.released = append(l.released, time.Since(l.begun))
	return l.release
}

// failing fails the renewals from the first up to the last.
func failing(first, last int, err error) func(ctx context.Context, nth int) error {
	return func(_ context.Context, nth int) error {
		if nth < first || nth > last {
			return nil
		}
		return err
	}
}

// seconds returns durations since the beginning.
func seconds(all ...int) []time.Duration {
	spans := make([]time.Duration, len(all))
	for i, n := range all {
		spans[i] = time.Duration(n) * time.Second
	}
	return spans
}

// TestKeep is a story for each way that a lease can go, told by the process's own clock.
func TestKeep(t *testing.T) {
	t.Parallel()
	down := errors.New("the server is down")
	for name, c := range map[string]struct {
		landlord landlord
		works    time.Duration
		dies     time.Duration // when the context that the work was given ends; 0: never
		old      time.Duration // how long before the lease was had
		lostAt   time.Duration // 0: never
		cause    error
		renewals []time.Duration
		released []time.Duration
	}{
		"IsRenewedAtEachThird": {
			works: 70 * time.Second, renewals: seconds(20, 40, 60), released: seconds(70),
		},
		"EndsBeforeTheFirstRenewal": {
			works: 19 * time.Second, released: seconds(19),
		},
		"IsRenewedOnWhenTheCallerHasGone": {
			works: 50 * time.Second, dies: 5 * time.Second, cause: context.Canceled, lostAt: 5 * time.Second,
			renewals: seconds(20, 40), released: seconds(50),
		},
		"IsLostByFailuresForTwoThirds": {
			landlord: landlord{renew: failing(1, 8, down)}, // at 20, 25 .. 55
			works:    70 * time.Second, lostAt: 60 * time.Second, cause: errLost,
			renewals: seconds(20, 25, 30, 35, 40, 45, 50, 55), released: seconds(70),
		},
		"IsNotLostByFailuresThatEndInTime": {
			landlord: landlord{renew: failing(1, 7, down)},
			works:    80 * time.Second, renewals: seconds(20, 25, 30, 35, 40, 45, 50, 55, 75), released: seconds(80),
		},
		"IsNotLostByARenewalThatPanics": {
			landlord: landlord{renew: func(_ context.Context, nth int) error {
				if nth == 1 {
					panic("a tracer")
				}
				return nil
			}},
			works: 70 * time.Second, renewals: seconds(20, 25, 45, 65), released: seconds(70),
		},
		"IsLostWhenTheServerSaysSo": {
			landlord: landlord{renew: failing(2, 2, errLost)},
			works:    100 * time.Second, lostAt: 40 * time.Second, cause: errLost, renewals: seconds(20, 40),
		},
		"IsLostInTimeWhenARenewalHangs": {
			landlord: landlord{renew: func(ctx context.Context, _ int) error {
				<-ctx.Done()
				time.Sleep(5 * time.Second) // it takes its time to notice
				return ctx.Err()
			}},
			works: 100 * time.Second, lostAt: 60 * time.Second, cause: errLost, renewals: seconds(20), released: seconds(100),
		},
		"IsLostInTimeWhenAnAnswerComesLate": {
			landlord: landlord{renew: func(context.Context, int) error {
				time.Sleep(45 * time.Second)
				return nil
			}},
			works: 100 * time.Second, lostAt: 60 * time.Second, cause: errLost, renewals: seconds(20), released: seconds(100),
		},
		"CountsFromBeforeTheAnswer": {
			landlord: landlord{renew: func(ctx context.Context, nth int) error {
				time.Sleep(10 * time.Second)
				return failing(2, 9, down)(ctx, nth)
			}},
			// Asked at 20, answered at 30: it holds until 80, and is renewed from 40.
			works: 90 * time.Second, lostAt: 80 * time.Second, cause: errLost, renewals: seconds(20, 40, 55, 70), released: seconds(90),
		},
		"IsRenewedAtOnceWhenItMayBeOver": {
			old: time.Hour, works: 30 * time.Second, renewals: seconds(0, 20), released: seconds(30),
		},
		"IsRenewedSoonerWhenItIsOld": {
			old: 50 * time.Second, works: 30 * time.Second, renewals: seconds(0, 20), released: seconds(30),
		},
		"IsLostFromTheBeginning": {
			landlord: landlord{renew: failing(1, 1, errLost)},
			old:      time.Hour, works: time.Second, lostAt: 1, cause: errLost, renewals: seconds(0),
		},
		"IsLostAndReleasedWhenItCannotBeKnown": {
			landlord: landlord{renew: failing(1, 1, down)},
			old:      time.Hour, works: time.Second, lostAt: 1, cause: down, renewals: seconds(0), released: seconds(1),
		},
		"WasLostWhenTheReleaseSaysSo": {
			landlord: landlord{release: errLost},
			works:    time.Second, lostAt: time.Second, cause: errLost, released: seconds(1),
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				l := &c.landlord
				l.begun = time.Now()
				ctx, die := context.WithCancel(t.Context())
				defer die()
				if c.dies > 0 {
					time.AfterFunc(c.dies, die)
				}
				held, lose := context.WithCancelCause(ctx)
				var lostAt time.Duration
				context.AfterFunc(held, func() { lostAt = max(time.Since(l.begun), 1) })
				release := Keep(ctx, l, "lease", Span{Asked: time.Now().Add(-c.old), Length: leaseLength}, lose)
				time.Sleep(c.works - time.Since(l.begun))
				release()
				release()
				synctest.Wait()
				require.Equal(t, c.renewals, slices.Clone(l.renewals))
				require.Equal(t, c.released, l.released)
				if c.lostAt == 0 {
					require.Equal(t, context.Canceled, context.Cause(held))
					require.Equal(t, c.works, lostAt, "it ends with release")
					return
				}
				require.ErrorIs(t, context.Cause(held), c.cause)
				require.Equal(t, c.lostAt, lostAt)
				time.Sleep(time.Hour) // nothing goes on
				require.Equal(t, c.renewals, slices.Clone(l.renewals))
			})
		})
	}
}

// owner begins transactions in memory.
type owner struct {
	store.Owner
	pool memory.Pool
}

func (o owner) InOwnTx(ctx context.Context, from *store.Session, fn func(tx *store.Session) error) error {
	return pgx.BeginFunc(ctx, o.pool, func(tx pgx.Tx) error {
		bound := from.BoundTo(tx, o)
		return fn(&bound)
	})
}

// A renewal extends the leases on all rows of a call and returns the first end. If one of them is lost, it extends
// none.
func TestARenewalExtendsAllLeasesOfACallOrNone(t *testing.T) {
	t.Parallel()
	const minute = int64(time.Minute / time.Microsecond)
	now := int64(1_600_000_000_000_000)
	pool := memory.NewPool(nil)
	s := store.NewInMemory(store.Options{Schema: store.DefaultSchema, AsOf: func() *int64 { return new(now) }}).OnPool(pool, owner{pool: pool})
	slot := func(name string, lease int64) bucket.Ask {
		return bucket.Ask{
			Key: bucket.Key{Name: name, Key: "ada"}, Cost: 1,
			Terms: bucket.Terms{Capacity: 2, Rate: 1, Steps: 1, Step: 1, Kind: bucket.Concurrent{Lease: lease}},
		}
	}
	call := &store.Call{Question: store.Question{Verb: "acquire", Asks: []bucket.Ask{slot("a", 2*minute), slot("b", minute)}}}
	require.NoError(t, s.Decide(t.Context(), call))
	require.True(t, bucket.AllAllowed(call.Answers))
	lease, found := call.Asks[0].NewLease(&call.Answers[0])
	require.True(t, found)

	now += minute / 2
	renewal := Leases{Asks: call.Asks, Fence: lease.Fence, Lengths: []int64{2 * minute, minute}}
	require.NoError(t, renewal.Change(t.Context(), &s))
	require.False(t, renewal.AnyLost())
	require.Equal(t, now+minute, renewal.EndUs)

	end := now + 2*minute
	release := Leases{Asks: call.Asks[1:], Fence: lease.Fence, Lengths: []int64{minute}, Release: true}
	require.NoError(t, release.Change(t.Context(), &s))
	now += minute / 2
	require.NoError(t, renewal.Change(t.Context(), &s))
	require.Equal(t, []bool{false, true}, renewal.Lost)
	rows, err := s.Look(t.Context(), call.Asks[:1], nil)
	require.NoError(t, err)
	require.Equal(t, []bucket.Held{{Fence: lease.Fence, End: end, Slots: 1}}, rows[0].State.Leases())
}

// named accepts a share whose limit has a name.
func named(of *Share) bool { return of.Row.Name != "" }

func TestLeaseIDsAreReadAsTheyWereWritten(t *testing.T) {
	t.Parallel()
	var most ID
	most.Fence = 1 << 62
	for i := range MaxShares {
		row := bucket.Key{Name: strings.Repeat("n", 63) + string(rune('0'+i)), Key: strings.Repeat("k", maxText)}
		most.Of = append(most.Of, Share{row, strings.Repeat("p", maxText), MaxSlots, bucket.MaxLease})
	}
	for name, id := range map[string]ID{
		"one":     {1795347039021027, []Share{{bucket.Key{Name: "jobs", Key: "user 17"}, "", 1, 60_000_000}}},
		"global":  {7, []Share{{bucket.Key{Name: "jobs"}, "pro", 0, 1000}}},
		"several": {7, []Share{{bucket.Key{Name: "a", Key: "z"}, "", 2, 1000}, {bucket.Key{Name: "b", Key: "ü\n"}, "", 1, 2000}}},
		"nothing": {7, nil},
	} {
		read, err := Parse(id.String(), named)
		require.NoError(t, err)
		require.Equal(t, id, *read, name)
		require.Regexp(t, `^L1[A-Za-z0-9_-]+$`, id.String())
	}
	require.LessOrEqual(t, len(most.String()), maxID)
	require.Less(t, maxID, 60_000)
	short := ID{time.Now().UnixMicro(), []Share{{bucket.Key{Name: "jobs", Key: "user 17"}, "", 1, 60_000_000}}}
	require.Less(t, len(short.String()), 60)
}
