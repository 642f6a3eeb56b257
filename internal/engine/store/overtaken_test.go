package store

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// whileWaiting runs call on a goroutine of its own, and then meanwhile once a statement waits for a lock in the
// database. It returns when call has returned.
func (s *stand) whileWaiting(call, meanwhile func()) {
	s.Helper()
	over := make(chan struct{})
	go func() {
		defer close(over)
		call()
	}()
	require.Eventually(s, func() (waits bool) {
		require.NoError(s, s.pool.QueryRow(s.Context(), `SELECT EXISTS (
			SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database())`).Scan(&waits))
		return waits
	}, time.Minute, time.Millisecond)
	meanwhile()
	<-over
}

// gate has a statement wait for a lock at a place in its text.
func (s *stand) gate(statement *string, place, gated string) {
	s.Helper()
	require.Contains(s, *statement, place)
	*statement = strings.Replace(*statement, place, gated, 1)
}

// gateFunction is gate for the text of a function.
func (s *stand) gateFunction(name, place, gated string) {
	s.Helper()
	var text string
	require.NoError(s, s.pool.QueryRow(s.Context(), `SELECT pg_get_functiondef(('ratelimit.' || $1)::regproc)`, name).Scan(&text))
	s.gate(&text, place, gated)
	s.exec(text)
}

// A Take that waited for its row decides on the row as the other transaction left it, and not on the row of its
// snapshot.
func TestATakeThatWaitedUsesTheLockedRow(t *testing.T) {
	t.Parallel()
	for name, l := range map[string]limit{
		"TokenBucket":   still("still", 10),
		"SlidingWindow": {"sliding", sliding(10, time.Hour.Microseconds(), 24)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStand(t)
			require.NoError(t, s.Decide(t.Context(), taking(l.ask("ada", 1))))
			tx := s.tx()
			other := s.InTx(tx, owner{s.pool}, nil)
			require.NoError(t, other.Decide(t.Context(), taking(l.ask("ada", 9))))

			call := taking(l.ask("ada", 2))
			var err error
			s.whileWaiting(func() { err = s.Decide(t.Context(), call) }, func() { require.NoError(t, tx.Commit(t.Context())) })
			require.NoError(t, err)
			require.False(t, bucket.AllAllowed(call.Answers))
			require.Equal(t, []float64{0}, call.tokens())
			require.Equal(t, []float64{0}, s.held(l.ask("ada", 0)))
		})
	}
}

// A batch that adds a row, which another transaction has added since the batch's snapshot, takes at most the tokens of
// that row.
func TestABatchTakesAtMostTheTokensOfAConcurrentlyInsertedRow(t *testing.T) {
	t.Parallel()
	const gate = "pg_advisory_xact_lock(4712)"
	s, l := newStand(t), still("still", 10)
	s.makeRows("ada", l)
	s.gateFunction("spend_1", "WHERE b.ts IS NOT NULL OR", "WHERE (SELECT set_config('lock_timeout', '0', true) || "+gate+"::text) IS NOT NULL AND b.ts IS NOT NULL OR")
	tx, ada, bob := s.tx("SELECT "+gate), taking(l.ask("ada", 1)), taking(l.ask("bob", 1))
	var waiting []blocked
	s.whileWaiting(func() { waiting = runBatch(t, s.Session, ada, bob) }, func() {
		s.exec(`INSERT INTO ratelimit.buckets VALUES ('still', 'bob', 0, 0, $1, 10)`, opening)
		require.NoError(t, tx.Commit(t.Context()))
	})
	require.Empty(t, waiting)
	require.True(t, ada.isAllowed(t))
	require.False(t, bob.isAllowed(t))
	require.Equal(t, []float64{9, 0}, s.held(l.ask("ada", 0), l.ask("bob", 0)))
}

// A call over several limits in a transaction locks its rows in the order of their keys, for any costs.
func TestATransactionLocksRowsInTheOrderOfTheirKeys(t *testing.T) {
	t.Parallel()
	s, l := newStand(t), still("still", 10)
	s.makeRows("ada", l)
	s.makeRows("bob", l)
	holder := s.tx(`SELECT FROM ratelimit.buckets WHERE key = 'bob' FOR UPDATE`)
	bound := s.InTx(s.tx(), owner{s.pool}, nil)
	call := taking(l.ask("ada", 2), l.ask("bob", 1))
	var err error
	s.whileWaiting(func() { err = bound.Decide(t.Context(), call) }, func() {
		require.Empty(t, s.freeRows(), "ada's row is locked before bob's")
		require.NoError(t, holder.Rollback(t.Context()))
	})
	require.NoError(t, err)
	require.True(t, bucket.AllAllowed(call.Answers))
}

// A refusal over several limits in a transaction takes nothing from limits that have enough, and leaves no row locked.
func TestARefusalInATransactionChangesAndLocksNothing(t *testing.T) {
	t.Parallel()
	s, l := newStand(t), still("still", 10)
	s.makeRows("ada", l)
	s.makeRows("bob", l)
	require.NoError(t, s.Decide(t.Context(), taking(l.ask("bob", 10))))
	tx := s.tx()
	bound := s.InTx(tx, owner{s.pool}, nil)
	c := taking(l.ask("ada", 1), l.ask("bob", 1))
	require.NoError(t, bound.takeByStatement(t.Context(), c))
	require.Equal(t, byStatement, c.way)
	require.True(t, c.Answers[0].Allowed)
	require.False(t, c.Answers[1].Allowed)
	require.Equal(t, []string{"still ada", "still bob"}, s.freeRows())
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, []float64{10, 0}, s.held(l.ask("ada", 0), l.ask("bob", 0)))
}

// A call that waited for a row, which another call has settled in the next revision meanwhile, decides in that
// revision.
func TestACallThatWaitedUsesTheEraOfItsRow(t *testing.T) {
	t.Parallel()
	terms, change := still("still", 10).terms, opening+int64(time.Second/time.Microsecond)
	revisions := bucket.NewRevisions([]bucket.Revision{{Terms: terms}, {From: change, Terms: terms}})
	asks := []bucket.Ask{{Key: bucket.Key{Name: "still", Key: "ada"}, Terms: revisions.Holding(opening)}}
	p := bucket.NewLedger(asks)
	p.Now = opening
	p.Put(0, bucket.State{Value: 5, TS: change}, false)
	p.SetNow(asks)
	require.Equal(t, change, p.Now)
	require.Equal(t, int32(1), asks[0].Terms.Revision)
}
