//go:build !generalpath

package store

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// Calls that share no bucket are groups of their own. Calls over several limits that share a bucket are one group. A call that no statement can
// decide, and later calls for its buckets, are in none.
func TestWhichCallsGoTogether(t *testing.T) {
	t.Parallel()
	a, b, c := still("a", 10), still("b", 10), still("c", 10)
	window := limit{"w", sliding(10, 1000, 4)}
	changed := still("a", 20)
	for name, test := range map[string]struct {
		calls  []*Call
		groups [][]int // the calls of each
	}{
		"OneForEachBucket":       {[]*Call{taking(a.ask("1", 1)), taking(a.ask("2", 1)), taking(a.ask("1", 1))}, [][]int{{0, 2}, {1}}},
		"EachByItself":           {[]*Call{taking(a.ask("1", 1), b.ask("1", 1)), taking(a.ask("2", 1), b.ask("2", 1))}, [][]int{{0}, {1}}},
		"ThoseThatShareABucket":  {[]*Call{taking(a.ask("1", 1), b.ask("1", 1)), taking(a.ask("2", 1), b.ask("2", 1)), taking(b.ask("1", 1), c.ask("1", 1))}, [][]int{{0, 2}, {1}}},
		"WithACallForOneBucket":  {[]*Call{taking(a.ask("1", 1)), taking(a.ask("1", 1), b.ask("1", 1)), taking(c.ask("1", 1))}, [][]int{{0, 1}, {2}}},
		"AllThatShareAny":        {[]*Call{taking(a.ask("1", 1), b.ask("1", 1)), taking(a.ask("1", 1)), taking(a.ask("2", 1), b.ask("2", 1)), taking(b.ask("2", 1))}, [][]int{{0, 1, 2, 3}}},
		"NoneBehindAReservation": {[]*Call{taking(a.ask("1", 1)), taking(b.ask("1", 1)), reserving(a.ask("1", 1), c.ask("1", 1)), taking(a.ask("1", 1)), taking(c.ask("1", 1))}, [][]int{{0}, {1}}},
		"NoneBehindOneBehindIt":  {[]*Call{reserving(a.ask("1", 1)), taking(a.ask("1", 1), b.ask("1", 1)), taking(b.ask("1", 1)), taking(b.ask("2", 1))}, [][]int{{3}}},
		"NoneWithAWindow":        {[]*Call{taking(a.ask("1", 1), window.ask("1", 1)), taking(window.ask("2", 1)), taking(a.ask("2", 1))}, [][]int{{2}}},
		"NoneUnderOtherPolicies": {[]*Call{taking(a.ask("1", 1)), taking(changed.ask("1", 1)), taking(a.ask("1", 1))}, [][]int{{0}}},
		"NoneAboveTheCapacity":   {[]*Call{taking(a.ask("1", 11)), taking(a.ask("1", 1))}, nil},
		"ALookIsInNobodysWay":    {[]*Call{looking(a.ask("1", 1)), taking(a.ask("1", 1), b.ask("1", 1))}, [][]int{{1}}},
		"WithOneRowOfSeveral":    {[]*Call{taking(a.ask("1", 1), b.over(2).ask("1", 1)), taking(b.over(2).ask("1", 1))}, [][]int{{0, 1}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := planOf(test.calls, false)
			var got [][]int
			for _, g := range p.groups {
				var calls []int
				for _, c := range g.calls {
					calls = append(calls, slices.Index(test.calls, c))
				}
				got = append(got, calls)
			}
			require.Equal(t, test.groups, got)
			require.Len(t, p.others, len(test.calls)-len(slices.Concat(got...)))
		})
	}
}

// If the buckets have enough for all calls, one round trip takes for all of them, and each answer has the tokens left after it.
func TestClustersAreTakenAtOnce(t *testing.T) {
	t.Parallel()
	pool := spyOn(postgrestest.New(t))
	s := newSession(pool, standing)
	user, all := still("user", 10), still("all", 100)
	for _, key := range []string{"ada", "bob"} {
		makeRows(t, pool, key, user)
	}
	makeRows(t, pool, "", all)
	calls := []*Call{
		taking(user.ask("ada", 1), all.ask("", 1)), taking(user.ask("bob", 2), all.ask("", 3)), taking(user.ask("ada", 4), all.ask("", 5)),
		taking(all.ask("", 6)), taking(user.ask("bob", 1)),
	}
	require.Empty(t, runBatch(t, s, calls...))
	for i, left := range [][]float64{{99, 9}, {96, 8}, {91, 5}, {85}, {7}} {
		require.True(t, calls[i].isAllowed(t))
		require.Equal(t, left, calls[i].tokens(), "call %d", i)
	}
	require.Equal(t, 1, pool.trips)
	require.Equal(t, []float64{85, 5, 7}, held(t, s, all.ask("", 0), user.ask("ada", 0), user.ask("bob", 0)))
}

// Calls for one sliding window are folded into one statement.
func TestCallsForAWindowAreFolded(t *testing.T) {
	t.Parallel()
	pool := spyOn(postgrestest.New(t))
	s, l := newSession(pool, standing), limit{"window", sliding(1, 1_000_000, 60)}
	calls := []*Call{taking(l.ask("key", 0.125)), taking(l.ask("key", 0.125)), taking(l.ask("key", 0.125))}
	require.Empty(t, runBatch(t, s, calls...))
	require.Equal(t, 1, pool.trips)
	for _, c := range calls {
		require.True(t, c.isAllowed(t))
	}
	require.Equal(t, []float64{0.625}, held(t, s, l.ask("key", 0)))
}

// Calls over several limits take from one row of a bucket that has several, and from all of its rows when that has too little.
func TestClustersTakeFromOneOfSeveralRows(t *testing.T) {
	t.Parallel()
	pool := spyOn(postgrestest.New(t))
	s := newSession(pool, standing)
	user, wide := still("user", 10), still("wide", 80).over(8)
	makeRows(t, pool, "ada", user)
	makeRows(t, pool, "bob", user)
	_, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.buckets SELECT 'wide', '', shard, 10, $1 FROM generate_series(0, 7) AS shard`, opening)
	require.NoError(t, err)
	run := func(cost float64) (calls []*Call) {
		calls = []*Call{taking(user.ask("ada", 1), wide.ask("", cost)), taking(user.ask("bob", 1), wide.ask("", cost))}
		require.Empty(t, runBatch(t, s, calls...))
		return calls
	}
	for _, c := range run(4) {
		require.True(t, c.isAllowed(t))
	}
	require.Equal(t, 1, pool.trips)
	for _, c := range run(9) {
		require.True(t, c.isAllowed(t), "other rows have enough")
	}
	require.Equal(t, []float64{8, 8, 80 - 8 - 18}, held(t, s, user.ask("ada", 0), user.ask("bob", 0), wide.ask("", 0)))
	for i, c := range run(50) {
		require.Equal(t, i == 0, c.isAllowed(t))
	}
	require.Equal(t, []float64{7, 8, 4}, held(t, s, user.ask("ada", 0), user.ask("bob", 0), wide.ask("", 0)))
}

// A locked row stops only the calls that need it, also within their cluster. Nothing is taken for these calls meanwhile.
func TestAHeldRowStopsTheCallsOfAClusterThatNeedIt(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	s := newSession(pool, standing)
	user, all := still("user", 10), still("all", 100)
	for _, key := range []string{"ada", "bob"} {
		makeRows(t, pool, key, user, all)
	}
	_, err := begin(t, pool).Exec(t.Context(), `SELECT FROM ratelimit.buckets WHERE name = 'user' AND key = 'ada' FOR UPDATE`)
	require.NoError(t, err)
	calls := []*Call{
		taking(user.ask("ada", 1), all.ask("ada", 1)), taking(all.ask("ada", 1)), taking(user.ask("bob", 1), all.ask("bob", 1)),
	}
	waiting := runBatch(t, s, calls...)
	require.Len(t, waiting, 1)
	require.Same(t, calls[0], waiting[0].Call.Of)
	require.Equal(t, user.ask("ada", 0).Key, waiting[0].Row)
	require.True(t, calls[1].isAllowed(t))
	require.True(t, calls[2].isAllowed(t))
	require.Equal(t, []float64{99}, held(t, s, all.ask("ada", 0)))

	alone := taking(user.ask("ada", 1), all.ask("ada", 1))
	blocked := runBatch(t, s, alone)
	require.Len(t, blocked, 1)
	require.Equal(t, user.ask("ada", 0).Key, blocked[0].Row)
	require.Equal(t, []float64{99}, held(t, s, all.ask("ada", 0)))
}

// overtaken makes a call whose statement stands still between its look and its locks, until another connection has run a
// statement.
func overtaken(t *testing.T, pool *pgxpool.Pool, call *Call, alone bool, statement string) error {
	t.Helper()
	const gate = 4711
	s := newSession(pool, standing)
	s.statements.spendClusters = strings.Replace(s.statements.spendClusters, "FROM seen AS s WHERE NOT (",
		fmt.Sprintf("FROM seen AS s WHERE pg_advisory_xact_lock(%d)::text IS NULL OR NOT (", gate), 1)
	tx := begin(t, pool)
	_, err := tx.Exec(t.Context(), `SELECT pg_advisory_xact_lock($1)`, gate)
	require.NoError(t, err)
	whileWaiting(t, pool, func() {
		if alone {
			err = s.Decide(t.Context(), call)
			return
		}
		s.decideAll(t.Context(), call)
		err = call.Result()
	}, func() {
		_, err := pool.Exec(t.Context(), statement)
		require.NoError(t, err)
		require.NoError(t, tx.Commit(t.Context()))
	})
	return err
}

// If another transaction writes between the look and the lock, the statement takes nothing, and the call is decided on the new
// rows.
func TestAClusterThatIsOvertakenTakesNothingOfWhatWasSeen(t *testing.T) {
	t.Parallel()
	user, all := still("user", 10), still("all", 100)
	for name, test := range map[string]struct {
		overtake string
		rows     []limit   // that exist before
		left     []float64 // of all and of user
	}{
		"Taken":   {`UPDATE ratelimit.buckets SET value = value - 3 WHERE name = 'all'`, []limit{user, all}, []float64{96, 9}},
		"Emptied": {`UPDATE ratelimit.buckets SET value = 0 WHERE name = 'all'`, []limit{user, all}, []float64{0, 10}},
		"Deleted": {`DELETE FROM ratelimit.buckets WHERE name = 'all'`, []limit{user, all}, []float64{99, 9}},
		"Made":    {fmt.Sprintf(`INSERT INTO ratelimit.buckets VALUES ('user', 'ada', 0, 5, %d)`, opening), []limit{all}, []float64{99, 4}},
		"Not":     {`SELECT`, []limit{user, all}, []float64{99, 9}},
	} {
		for _, alone := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/Alone=%v", name, alone), func(t *testing.T) {
				t.Parallel()
				pool := postgrestest.New(t)
				makeRows(t, pool, "ada", test.rows...)
				call := taking(user.ask("ada", 1), all.ask("ada", 1))
				require.NoError(t, overtaken(t, pool, call, alone, test.overtake))
				require.Equal(t, name != "Emptied", bucket.AllAllowed(call.Answers))
				require.Equal(t, test.left, held(t, newSession(pool, standing), all.ask("ada", 0), user.ask("ada", 0)))
			})
		}
	}
}

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
