//go:build !generalpath

package store

import (
	"math/rand/v2"
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
	for process := range processes {
		random := rand.New(rand.NewPCG(seed, uint64(process)))
		s := newSession(pool, standing)
		racing.Go(func() {
			for range rounds {
				calls := make([]*Call, 1+random.IntN(callsInBatch))
				for i := range calls {
					calls[i] = taking(randomSet(random, limits, keys)...)
				}
				s.decideAll(t.Context(), calls...)
				mu.Lock()
				for _, c := range calls {
					err := c.Result()
					for IsConflict(err) { // for which an Owner that is not of a test would make it again
						err = s.decideOne(t.Context(), c)
					}
					switch {
					case err != nil:
						t.Error(err)
					case !bucket.AllAllowed(c.Answers):
						refused++
					default:
						for _, a := range c.Asks {
							taken[a.Key] += a.Cost
						}
					}
				}
				mu.Unlock()
			}
		})
	}
	racing.Wait()
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
