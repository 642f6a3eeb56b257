package integration_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// slot names one of the booked buckets.
type slot struct{ limit, key int }

func (s slot) request() ratelimit.Request { return booked[s.limit].For(fmt.Sprint("key", s.key)) }

// ledger sums up the tokens taken from each bucket, by the answers of the calls.
type ledger struct {
	mu    sync.Mutex
	taken map[slot]float64
}

func (l *ledger) add(tokens float64, slots ...slot) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range slots {
		l.taken[s] += tokens
	}
}

// The limits of the histories below, of which the last may owe.
var booked = []ratelimit.Limit{
	ratelimit.Define("whole", hoard(100)),
	ratelimit.Define("fraction", hoard(40)),
	ratelimit.Define("owing", ratelimit.TokenBucket{Rate: 100, Period: century, MaxReserved: 50}),
}

var bookedCosts = []float64{1, 2, 7, 0.1, 1.0 / 3, 0.25}

// book makes a random call and adds the tokens it took.
func book(ctx context.Context, limiter *ratelimit.Limiter, random *rand.Rand, l *ledger) error {
	cost := bookedCosts[random.IntN(len(bookedCosts))]
	var slots []slot
	var requests []ratelimit.Request
	for _, i := range random.Perm(len(booked))[:1+random.IntN(5)/3] {
		slots = append(slots, slot{i, random.IntN(3)})
		requests = append(requests, slots[len(slots)-1].request().Cost(cost))
	}
	switch random.IntN(8) {
	case 0:
		_, err := limiter.Check(ctx, requests...)
		return err
	case 1, 2:
		owing := slot{2, 0}
		r, err := limiter.Reserve(ctx, owing.request().Cost(cost))
		if err != nil || !r.Allowed {
			return err
		}
		if random.IntN(3) == 0 {
			return limiter.Cancel(ctx, r.ID)
		}
		actual := cost / float64(1+random.IntN(3))
		l.add(actual, owing)
		return limiter.Settle(ctx, r.ID, owing.request().Cost(actual))
	default:
		d, err := limiter.Take(ctx, requests...)
		if err != nil || !d.Allowed {
			return err
		}
		l.add(cost, slots...)
		return nil
	}
}

// The tokens gone from each bucket at the end are the tokens that the answers say were taken, for any batches and any number of
// processes.
func TestManyCallersTakeExactlyWhatTheyAreTold(t *testing.T) {
	t.Parallel()
	onEach(t, testManyCallersTakeExactlyWhatTheyAreTold, onPostgres, inMemory)
}

func testManyCallersTakeExactlyWhatTheyAreTold(t *testing.T, on backend) {
	const callers, each = 48, 40
	b := on.setup(t)
	processes := []*ratelimit.Limiter{b.limiter, b.with(t, ratelimit.Config{}), b.with(t, ratelimit.Config{NoBatching: true})}
	seed := testsize.Seed(t)
	l := &ledger{taken: make(map[slot]float64)}
	require.NoError(t, atonce.Do(callers, func(caller int) error {
		random := rand.New(rand.NewPCG(seed, uint64(caller)))
		for range each {
			err := book(t.Context(), processes[caller%8/3], random, l)
			if err != nil {
				return err
			}
		}
		return nil
	}))
	for i, limit := range booked {
		for key := range 3 {
			bucket := slot{i, key}
			v, err := b.limiter.Value(t.Context(), bucket.request())
			require.NoError(t, err)
			require.InDelta(t, limit.Capacity()-l.taken[bucket], v.Tokens, 1e-4, "%v", bucket)
			require.Less(t, v.Tokens, 7.0, "the histories have to exhaust it")
			if limit.Name() == "owing" {
				require.Greater(t, v.Tokens, -50-1e-9)
			} else {
				require.GreaterOrEqual(t, v.Tokens, 0.0)
			}
		}
	}
}

// A reset allows at most a full bucket again, also beside calls in progress.
func TestResetsBesideBatchesAdmitNoMoreThanTheyRestore(t *testing.T) {
	t.Parallel()
	const resets, capacity = 5, 20
	callers, each := testsize.Of(12, 24), testsize.Of(20, 40)
	b := setup(t)
	limit := ratelimit.Define("limit", hoard(capacity))
	var admitted atomic.Int64
	require.NoError(t, atonce.Do(callers, func(caller int) error {
		for i := range each {
			if caller == 0 && i%(each/resets) == 0 {
				if err := b.limiter.Reset(t.Context(), limit.For("key")); err != nil {
					return err
				}
			}
			d, err := b.limiter.Take(t.Context(), limit.For("key"))
			if err != nil {
				return err
			}
			if d.Allowed {
				admitted.Add(1)
			}
		}
		return nil
	}))
	require.LessOrEqual(t, admitted.Load(), int64(capacity*(1+resets)))
	require.GreaterOrEqual(t, admitted.Load(), int64(capacity))
}

// The first callers of new keys meet at rows that are not there, or that are being deleted because they are full.
func TestBatchesOfFirstCallersBesidePrune(t *testing.T) {
	t.Parallel()
	const keys, capacity = 60, 3
	callers := testsize.Of(8, 24)
	b := setup(t)
	limit := ratelimit.Define("limit", hoard(capacity))
	b.exec(t, `INSERT INTO ratelimit.buckets SELECT 'limit', 'key' || n, 0, 3, 0 FROM generate_series(1, 60, 2) AS n`) // full long since
	var admitted [keys]atomic.Int64
	pruned := make(chan error, 1)
	ctx, stop := context.WithCancel(t.Context())
	go func() {
		for ctx.Err() == nil {
			if _, err := b.limiter.Prune(t.Context(), limit); err != nil {
				pruned <- err
				return
			}
		}
		pruned <- nil
	}()
	err := atonce.Do(callers, func(int) error {
		for i := range keys {
			d, err := b.limiter.Take(t.Context(), limit.For(fmt.Sprint("key", i)))
			if err != nil {
				return err
			}
			if d.Allowed {
				admitted[i].Add(1)
			}
		}
		return nil
	})
	stop()
	require.NoError(t, errors.Join(err, <-pruned))
	for i := range keys {
		require.EqualValues(t, capacity, admitted[i].Load(), "key %d", i)
	}
}
