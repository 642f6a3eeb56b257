package store

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// Calls that share no bucket are groups of their own. Calls over several limits that share a bucket are one group. A
// call that no statement can decide, and later calls for its buckets, are in none.
func TestWhichCallsFormAGroup(t *testing.T) {
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
		"NotBesideAWindow":       {[]*Call{taking(a.ask("1", 1), window.ask("1", 1)), taking(window.ask("2", 1)), taking(a.ask("2", 1))}, [][]int{{1}, {2}}},
		"NoneUnderOtherPolicies": {[]*Call{taking(a.ask("1", 1)), taking(changed.ask("1", 1)), taking(a.ask("1", 1))}, [][]int{{0}}},
		"NoneAboveTheCapacity":   {[]*Call{taking(a.ask("1", 11)), taking(a.ask("1", 1))}, nil},
		"ALookIsInNobodysWay":    {[]*Call{looking(a.ask("1", 1)), taking(a.ask("1", 1), b.ask("1", 1))}, [][]int{{1}}},
	} {
		p := planOf(test.calls)
		var got [][]int
		for _, g := range p.groups {
			var calls []int
			for _, c := range g.calls {
				calls = append(calls, slices.Index(test.calls, c))
			}
			got = append(got, calls)
		}
		require.Equal(t, test.groups, got, name)
		require.Len(t, p.others, len(test.calls)-len(slices.Concat(got...)), name)
	}
}

// If the buckets have enough for all calls, one round trip takes for all of them, and each answer has the tokens left
// after it.
func TestClustersAreTakenAtOnce(t *testing.T) {
	t.Parallel()
	s, user, all := newStand(t), still("user", 10), still("all", 100)
	s.makeRows("ada", user)
	s.makeRows("bob", user)
	s.makeRows("", all)
	s.pool.trips = 0
	calls := []*Call{
		taking(user.ask("ada", 1), all.ask("", 1)), taking(user.ask("bob", 2), all.ask("", 3)), taking(user.ask("ada", 4), all.ask("", 5)),
		taking(all.ask("", 6)), taking(user.ask("bob", 1)),
	}
	s.allows(calls...)
	for i, left := range [][]float64{{99, 9}, {96, 8}, {91, 5}, {85}, {7}} {
		require.Equal(t, left, calls[i].tokens(), "call %d", i)
	}
	require.Equal(t, 1, s.pool.trips)
	require.Equal(t, []float64{85, 5, 7}, s.held(all.ask("", 0), user.ask("ada", 0), user.ask("bob", 0)))
}

// Calls for one sliding window are folded into one statement.
func TestCallsForAWindowAreFolded(t *testing.T) {
	t.Parallel()
	s, l := newStand(t), limit{"window", sliding(1, 1_000_000, 60)}
	s.allows(taking(l.ask("key", 0.125)), taking(l.ask("key", 0.125)), taking(l.ask("key", 0.125)))
	require.Equal(t, 1, s.pool.trips)
	require.Equal(t, []float64{0.625}, s.held(l.ask("key", 0)))
}

// A locked row stops only the calls that need it, also within their cluster. Nothing is taken for these calls
// meanwhile.
func TestAHeldRowDelaysOnlyTheCallsOfAClusterThatNeedIt(t *testing.T) {
	t.Parallel()
	s, user, all := newStand(t), still("user", 10), still("all", 100)
	s.makeRows("ada", user, all)
	s.makeRows("bob", user, all)
	holder := s.tx(`SELECT FROM ratelimit.buckets WHERE name = 'user' AND key = 'ada' FOR UPDATE`)
	both, first := []bucket.Ask{user.ask("ada", 1), all.ask("ada", 1)}, user.ask("ada", 0).Key
	with := []*Call{taking(all.ask("ada", 1)), taking(user.ask("bob", 1), all.ask("bob", 1))}
	for _, beside := range [][]*Call{with, nil} {
		call := taking(both...)
		waiting := runBatch(t, s.Session, append([]*Call{call}, beside...)...)
		require.Len(t, waiting, 1)
		require.Same(t, call, waiting[0].Call.Of)
		require.Equal(t, first, waiting[0].Row)
		for _, c := range beside {
			require.True(t, c.isAllowed(t))
		}
		require.Equal(t, []float64{99}, s.held(all.ask("ada", 0)))
	}
	s.tx(`SELECT FROM ratelimit.buckets WHERE name = 'all' AND key = 'ada' FOR UPDATE`)
	require.NoError(t, holder.Rollback(t.Context()))
	for _, waits := range []int{0, manyWaits} { // after many waits the call also waits shortly for the second row
		call := taking(both...)
		call.waits = waits
		call.Queueable().StartAlone()
		waiting := s.Session.Run(t.Context(), []*Call{call}, &first)
		require.Len(t, waiting, 1)
		require.Equal(t, all.ask("ada", 0).Key, waiting[0].Row)
	}
}

// If another transaction writes between the look and the take, the call is decided on the new rows. Here
// decide_groups_1 stands still between the two.
func TestACallOverSeveralLimitsIsDecidedOnTheNewestRows(t *testing.T) {
	t.Parallel()
	const gate = "pg_advisory_xact_lock(4711)"
	user, all := still("user", 10), still("all", 100)
	for name, test := range map[string]struct {
		overtake string
		rows     []limit   // that exist before
		left     []float64 // of all and of user
	}{
		"Taken":   {`UPDATE ratelimit.buckets SET value = value - 3 WHERE name = 'all'`, []limit{user, all}, []float64{96, 9}},
		"Emptied": {`UPDATE ratelimit.buckets SET value = 0 WHERE name = 'all'`, []limit{user, all}, []float64{0, 10}},
		"Deleted": {`DELETE FROM ratelimit.buckets WHERE name = 'all'`, []limit{user, all}, []float64{99, 9}},
		"Made":    {fmt.Sprintf(`INSERT INTO ratelimit.buckets VALUES ('user', 'ada', 0, 5, %d, 10)`, opening), []limit{all}, []float64{99, 4}},
		"Not":     {`SELECT`, []limit{user, all}, []float64{99, 9}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStand(t)
			s.makeRows("ada", test.rows...)
			s.gateFunction("decide_groups_1", "        BEGIN\n", "        PERFORM set_config('lock_timeout', '0', true), "+gate+";\n        BEGIN\n")
			tx, call := s.tx("SELECT "+gate), taking(user.ask("ada", 1), all.ask("ada", 1))
			var err error
			s.whileWaiting(func() { err = s.Decide(s.Context(), call) }, func() {
				s.exec(test.overtake)
				require.NoError(t, tx.Commit(t.Context()))
			})
			require.NoError(t, err)
			require.Equal(t, byStatement, call.way)
			require.Equal(t, name != "Emptied", bucket.AllAllowed(call.Answers))
			require.Equal(t, test.left, s.held(all.ask("ada", 0), user.ask("ada", 0)))
		})
	}
}

// If a statement of a batch fails, the takes of its other statements are rolled back, and no call is answered with
// them.
func TestRolledBackCreditsAreNotCounted(t *testing.T) {
	t.Parallel()
	const keys = 40
	s := newStand(t)
	first, second := tokenBucket("a", 10, time.Hour, 10, 0), tokenBucket("b", 10, time.Hour, 10, 0)
	for round := range 3 {
		made := second.ask(fmt.Sprint("being made ", round), 1)
		tx := s.tx(fmt.Sprintf(`INSERT INTO ratelimit.buckets VALUES ('%s', '%s', 0, 9, %d, 10)`, made.Key.Name, made.Key.Key, opening))
		before := spent(t, s.pool, first)
		calls := []*Call{taking(made)}
		for key := range keys {
			calls = append(calls, taking(first.ask(fmt.Sprint(round, " ", key), 1)))
		}
		waiting := runBatch(t, s.Session, calls...)
		waits := make(map[*Call]bool)
		for _, w := range waiting {
			waits[w.Call.Of] = true
		}
		require.True(t, waits[calls[0]], "its row is being made")
		require.LessOrEqual(t, len(waiting), 4, "one row stops the calls that need it, and few that were last beside them")
		allowed := 0
		for _, c := range calls {
			if !waits[c] {
				require.True(t, c.isAllowed(t))
				allowed++
			}
		}
		require.Equal(t, float64(allowed), spent(t, s.pool, first)-before)
		require.NoError(t, tx.Rollback(t.Context()))
	}
}

// A batch that meets a held row takes nothing. If its next attempt fails, its calls get that error, and nothing was
// taken.
func TestAFailureOfASecondAttemptTakesNothing(t *testing.T) {
	t.Parallel()
	s, batches := newStand(t), 0
	s.pool.change = func(batch *pgx.Batch) {
		if batches++; batches > 1 {
			*batch = pgx.Batch{}
			batch.Queue("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = 'deadlock_detected'; END $$")
		}
	}
	plain, held := tokenBucket("plain", 100, time.Hour, 100, 0), tokenBucket("held", 100, time.Hour, 100, 0)
	s.makeRows("key", held)
	s.tx(`SELECT FROM ratelimit.buckets WHERE name = 'held' FOR UPDATE`)
	alone, other := taking(plain.ask("key", 10)), taking(held.ask("key", 1))
	s.batch(alone, other)
	require.True(t, IsRetryable(alone.Result()))
	require.True(t, IsRetryable(other.Result()))
	require.Zero(t, spent(t, s.pool, plain))
}

// The keys of one limit may be on different plans. A batch decides on each by its own terms, as quickly as for one
// plan, unless there are too many plans.
func TestABatchDecidesOnKeysOnDifferentPlans(t *testing.T) {
	t.Parallel()
	for name, plans := range map[string]int{"two": 2, "as many as there are keys": 100} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStand(t)
			var calls []*Call
			for key := range 100 {
				capacity := float64(1 + key%plans)
				plan := tokenBucket("api", 1, time.Hour, capacity, 0)
				calls = append(calls, taking(plan.ask(fmt.Sprint(key), capacity)), taking(plan.ask(fmt.Sprint(key), 1)))
			}
			p := planOf(calls)
			require.Len(t, p.policies, min(plans, maxStatements))
			require.Equal(t, plans <= maxStatements, len(p.others) == 0)
			s.batch(calls...)
			for i, c := range calls {
				require.Equal(t, i%2 == 0, c.isAllowed(t), "call %d: the capacity of its plan, and no more", i)
			}
		})
	}
}
