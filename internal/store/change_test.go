package store

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/pgerr"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

// A credit fills a bucket to its capacity, and no further.
func TestACreditEndsAtTheCapacity(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	s := newSession(pool, standing)
	l := still("still", 10)
	require.NoError(t, s.Decide(t.Context(), taking(l.ask("ada", 4))))
	for _, left := range []float64{9, 10} {
		require.NoError(t, s.Charge(t.Context(), Charge{[]bucket.Ask{l.ask("ada", 0)}, []float64{-3}, []int64{bucket.Whenever}}))
		var value float64
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT value FROM ratelimit.buckets`).Scan(&value))
		require.Equal(t, left, value)
	}
}

// A call makes no row for a bucket from which it takes nothing, also when it takes tokens from another bucket.
func TestNoRowIsMadeForACostOfZero(t *testing.T) {
	t.Parallel()
	for name, inTx := range map[string]bool{"Alone": false, "InATransaction": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := postgrestest.New(t)
			s, tx, l := newSession(pool, standing), begin(t, pool), still("still", 10)
			if inTx {
				bound := s.InTx(tx, owner{pool}, nil)
				s = &bound
			}
			c := taking(l.ask("ada", 4), l.ask("bob", 0))
			require.NoError(t, s.Decide(t.Context(), c))
			require.True(t, bucket.AllAllowed(c.Answers))
			require.NoError(t, tx.Commit(t.Context()))
			require.Equal(t, []string{"ada"}, freeRows(t, pool))
		})
	}
}

// A credit of tokens of a window ends with the window: later it changes no row, and makes none.
func TestACreditEndsWithItsWindow(t *testing.T) {
	t.Parallel()
	pool, now := postgrestest.New(t), opening
	s := newSession(pool, func() *int64 { return new(now) })
	l := fixedWindow("window", 10, time.Minute, 10, 0)
	l.terms.PhaseByKey, l.terms.Phase = false, bucket.MinInstant
	l.terms.Phase = l.terms.Begin(opening) - l.terms.Step
	credit := func(key string) {
		require.NoError(t, s.Charge(t.Context(), Charge{[]bucket.Ask{l.ask(key, 0)}, []float64{-3}, []int64{opening}}))
	}
	require.NoError(t, s.Decide(t.Context(), taking(l.ask("ada", 4))))
	credit("ada")
	require.Equal(t, []float64{9}, held(t, s, l.ask("ada", 0)))

	now += l.terms.Step
	require.NoError(t, s.Decide(t.Context(), taking(l.ask("ada", 4))))
	credit("ada")
	credit("bob")
	require.Equal(t, []float64{6}, held(t, s, l.ask("ada", 0)))
	var rows int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM ratelimit.buckets`).Scan(&rows))
	require.Equal(t, 1, rows)
}

// Prune deletes a bucket that is full under each policy of its limit, and keeps a bucket that is full under only one of them.
func TestPruneKeepsABucketThatIsNotFullUnderEachPolicy(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	small, large := still("still", 10), still("still", 100)
	makeRows(t, pool, "full", large)
	makeRows(t, pool, "half", small)
	later := opening + time.Hour.Microseconds()
	s := newSession(pool, func() *int64 { return &later })
	pages, err := s.Engine().PrunePages(t.Context(), &s.Unit)
	require.NoError(t, err)
	deleted, gotLock, err := s.Engine().Prune(t.Context(), &s.Unit, pages, map[string][]bucket.Terms{"still": {small.terms, large.terms}})
	require.NoError(t, err)
	require.True(t, gotLock)
	require.Equal(t, int64(1), deleted)
	require.Equal(t, []string{"half"}, freeRows(t, pool))
}

// A row is spare if it was full under each policy, counted from its last slice, and its leases had ended.
func TestIsSpare(t *testing.T) {
	t.Parallel()
	const second = int64(time.Second / time.Microsecond)
	small, large := tokenBucket("spare", 1, time.Second, 10, 0).terms, tokenBucket("spare", 1, time.Second, 20, 0).terms
	until := opening - PruneIdle.Microseconds()
	for name, test := range map[string]struct {
		row  bucket.State
		want bool
	}{
		"Full":          {bucket.State{Value: 20, TS: until}, true},
		"FullByNow":     {bucket.State{TS: until - 20*second}, true},
		"FullUnderOne":  {bucket.State{Value: 10, TS: until}, false},
		"Young":         {bucket.State{Value: 20, TS: until + 1}, false},
		"ALaterSlice":   {bucket.State{TS: until - 20*second, Parts: &bucket.Parts{Taken: []float64{1e6}}}, false},
		"ALeaseIsOver":  {bucket.State{Value: 20, TS: until, Parts: &bucket.Parts{Leases: []int64{1, 1, until, 1}}}, true},
		"ALeaseIsHeld":  {bucket.State{Value: 20, TS: until, Parts: &bucket.Parts{Leases: []int64{1, 1, until + 1, 1}}}, false},
		"OfAnotherKind": {bucket.State{Value: 20, TS: until, Parts: &bucket.Parts{}}, true},
	} {
		require.Equal(t, test.want, IsSpare([]bucket.Terms{small, large}, opening)(test.row), name)
	}
}

// In a transaction that a statement has aborted, each operation returns the error of Postgres.
func TestAnAbortedTransactionIsAnError(t *testing.T) {
	t.Parallel()
	pool, l := postgrestest.New(t), still("still", 10)
	tx := begin(t, pool)
	_, err := tx.Exec(t.Context(), "SELECT 1/0")
	require.Error(t, err)
	s := newSession(pool, standing).InTx(tx, owner{pool}, nil)
	ada, bob := l.ask("ada", 1), l.ask("bob", 1)
	for name, do := range map[string]func() error{
		"TakeOne":     func() error { return s.Decide(t.Context(), taking(ada)) },
		"TakeSeveral": func() error { return s.Decide(t.Context(), taking(ada, bob)) },
		"Reserve":     func() error { return s.Decide(t.Context(), reserving(ada, bob)) },
		"Fill":        func() error { return s.Fill(t.Context(), []bucket.Ask{ada}) },
		"Charge": func() error {
			return s.Charge(t.Context(), Charge{[]bucket.Ask{ada}, []float64{-1}, []int64{bucket.Whenever}})
		},
		"Undo": func() error { return postgres{}.Undo(t.Context(), &s.Unit, nil) },
	} {
		require.Equal(t, "25P02", pgerr.Code(do()), name)
	}
}
