//go:build !generalpath

package store

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// Batches and lone calls of several processes take from overlapping sets of buckets, each in an order of its own. They take exactly
// as answered: from all buckets of a call or from none, and from no bucket more than it held.
func TestOverlappingClustersTakeExactly(t *testing.T) {
	t.Parallel()
	const processes, callsInBatch, capacity = 4, 6, 100.0
	rounds := testsize.Of(20, 40)
	pool := postgrestest.New(t)
	seed := testsize.Seed(t)
	limits := []limit{still("a", capacity), still("b", capacity), still("c", 1e6), still("d", 1e6)}
	keys := []string{"1", "2", "3"}
	for _, key := range keys[:2] { // the first call inserts the rows of the third
		makeRows(t, pool, key, limits...)
	}
	var mu sync.Mutex
	taken := make(map[bucket.Key]float64)
	refused := 0
	var racing sync.WaitGroup
	failed := make([]error, processes)
	for process := range processes {
		random := rand.New(rand.NewPCG(seed, uint64(process)))
		s := newSession(pool, standing)
		racing.Go(func() {
			for range rounds {
				calls := make([]*Call, 1+random.IntN(callsInBatch))
				for i := range calls {
					calls[i] = taking(randomSet(random, limits, keys)...)
				}
				told, err := s.decideAll(t.Context(), calls)
				if err != nil {
					failed[process] = err
					return
				}
				mu.Lock()
				for _, c := range told {
					if !bucket.AllAllowed(c.Answers) {
						refused++
						continue
					}
					for _, a := range c.Asks {
						taken[a.Key] += a.Cost
					}
				}
				mu.Unlock()
			}
		})
	}
	racing.Wait()
	for _, err := range failed {
		require.NoError(t, err)
	}
	require.Positive(t, refused)
	for _, l := range limits {
		for _, key := range keys {
			left := held(t, newSession(pool, standing), l.ask(key, 0))[0]
			require.GreaterOrEqual(t, left, 0.0)
			require.Equal(t, l.terms.Capacity-taken[l.ask(key, 0).Key], left, "%s %s", l.name, key)
		}
	}
}

// randomSet returns asks for several buckets of random keys.
func randomSet(random *rand.Rand, limits []limit, keys []string) (asks []bucket.Ask) {
	for _, i := range random.Perm(len(limits))[:2+random.IntN(len(limits)-1)] {
		asks = append(asks, limits[i].ask(keys[random.IntN(len(keys))], float64(1+random.IntN(3))))
	}
	return asks
}

// decideAll decides on calls, as a batch if they are several, and then by itself on each call that waits for a row. It returns the
// decided calls.
func (s *Session) decideAll(ctx context.Context, calls []*Call) (told []*Call, err error) {
	apart := calls
	if len(calls) > 1 {
		for _, c := range calls {
			c.Queueable().StartAlone()
		}
		apart = nil
		for _, w := range s.Run(ctx, calls, nil) {
			apart = append(apart, w.Call.Of)
		}
		for _, c := range calls {
			if slices.Contains(apart, c) {
				continue
			}
			switch err := c.Result(); {
			case IsConflict(err): // for which an Owner that is not of a test would make it again
				apart = append(apart, c)
			case err != nil:
				return nil, err
			default:
				told = append(told, c)
			}
		}
	}
	for _, c := range apart {
		err := s.decideOne(ctx, c)
		for IsConflict(err) {
			err = s.decideOne(ctx, c)
		}
		if err != nil {
			return nil, err
		}
	}
	return append(told, apart...), nil
}
