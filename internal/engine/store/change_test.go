package store

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/pgerr"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
)

// A call makes no row for a bucket from which it takes nothing, also when it takes tokens from another bucket.
func TestNoRowIsMadeForACostOfZero(t *testing.T) {
	t.Parallel()
	for name, inTx := range map[string]bool{"Alone": false, "InATransaction": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, l := newStand(t), still("still", 10)
			tx, decides := s.tx(), s.Session
			if inTx {
				bound := s.InTx(tx, owner{s.pool}, nil)
				decides = &bound
			}
			c := taking(l.ask("ada", 4), l.ask("bob", 0))
			require.NoError(t, decides.Decide(t.Context(), c))
			require.True(t, bucket.AllAllowed(c.Answers))
			require.NoError(t, tx.Commit(t.Context()))
			require.Equal(t, []string{"still ada"}, s.freeRows())
		})
	}
}

// Prune deletes a bucket that is full under each policy of its limit, and keeps a bucket that is full under only one of
// them.
func TestPruneKeepsABucketUnlessItIsFullUnderEachPolicy(t *testing.T) {
	t.Parallel()
	s, small, large := newStand(t), still("still", 10), still("still", 100)
	s.makeRows("full", large)
	s.makeRows("half", small)
	s.now += time.Hour.Microseconds()
	pages, err := s.Engine().PrunePages(t.Context(), &s.Unit)
	require.NoError(t, err)
	deleted := int64(0)
	for !pages.IsDone() {
		n, gotLock, err := s.Engine().Prune(t.Context(), &s.Unit, pages, map[string][]bucket.Terms{"still": {small.terms, large.terms}})
		require.NoError(t, err)
		require.True(t, gotLock)
		deleted += n
	}
	require.Equal(t, int64(1), deleted)
	require.Equal(t, []string{"still half"}, s.freeRows())
}

// A row is spare if it was full under each policy, counted from its last slice, and its leases had ended. So says
// spare_1, too.
func TestIsSpare(t *testing.T) {
	t.Parallel()
	const second = int64(time.Second / time.Microsecond)
	small, large := tokenBucket("spare", 1, time.Second, 10, 0).terms, tokenBucket("spare", 1, time.Second, 20, 0).terms
	until, pool := opening-PruneIdle.Microseconds(), postgrestest.New(t)
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
		policies := []bucket.Terms{small, large}
		require.Equal(t, test.want, IsSpare(policies, opening)(test.row), name)
		var taken []float64
		var leased []int64
		if p := test.row.Parts; p != nil {
			taken = p.Taken
			if p.Leases != nil {
				leased = []int64{p.Leases[0], p.Leases[2], p.Leases[2]}
			}
		}
		c, spare := columnsOf(distinct(policies)), false
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT ratelimit.spare_1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)`, test.row.Value, test.row.TS,
			test.row.Capacity, taken, leased, until, c.capacities, c.rates, c.stepUs, c.steps).Scan(&spare))
		require.Equal(t, test.want, spare, name)
	}
}

// In a transaction that a statement has aborted, each operation returns the error of Postgres.
func TestAnAbortedTransactionIsAnError(t *testing.T) {
	t.Parallel()
	outside, l := newStand(t), still("still", 10)
	tx := outside.tx()
	_, err := tx.Exec(t.Context(), "SELECT 1/0")
	require.Error(t, err)
	s := outside.InTx(tx, owner{outside.pool}, nil)
	ada, bob := l.ask("ada", 1), l.ask("bob", 1)
	for name, do := range map[string]func() error{
		"TakeOne":     func() error { return s.Decide(t.Context(), taking(ada)) },
		"TakeSeveral": func() error { return s.Decide(t.Context(), taking(ada, bob)) },
		"Reserve":     func() error { return s.Decide(t.Context(), reserving(ada, bob)) },
		"Fill":        func() error { return s.Fill(t.Context(), []bucket.Ask{ada}) },
		"Charge": func() error {
			return s.Charge(t.Context(), Charge{[]bucket.Ask{ada}, []float64{-1}, []int64{bucket.Whenever}})
		},
	} {
		require.Equal(t, "25P02", pgerr.Code(do()), name)
	}
}

// claiming notes whether the caller could still leave the call when its record was made.
type claiming struct {
	keeping

	call *Call
	left *bool
}

func (k claiming) Row() Row {
	*k.left = k.call.Leave()
	return k.keeping.Row()
}

// A batch of one Reserve claims it before it keeps a record: from then on its caller waits for the commit. If the
// caller has left before, nothing is taken.
func TestALoneReserveIsClaimed(t *testing.T) {
	t.Parallel()
	s, asks := newStand(t), tokenBucket("still", 1, 3600e9, 10, 0)
	stays, left := reserving(asks.ask("stays", 4)), false
	stays.Reserve = claiming{call: stays, left: &left}
	s.batch(stays)
	require.False(t, left, "the call was not claimed")
	require.True(t, stays.isAllowed(t))
	require.NotNil(t, stays.Record)

	gone := reserving(asks.ask("gone", 4))
	gone.Queueable().StartAlone()
	require.True(t, gone.Leave())
	require.Empty(t, s.Session.Run(t.Context(), []*Call{gone}, nil))
	require.Nil(t, gone.Record)
	require.Equal(t, []float64{10}, s.held(asks.ask("gone", 0)))
}

// A batch of Reserves is one round trip, also for one bucket. Each is decided by itself, in their order, and keeps a
// record if it is allowed.
func TestABatchOfReservesIsOneRoundTrip(t *testing.T) {
	t.Parallel()
	s, l := newStand(t), still("still", 10)
	l.terms.MaxDebt = 5
	calls := []*Call{
		reserving(l.ask("bob", 1)), reserving(l.ask("ada", 4)), reserving(l.ask("ada", 8)), reserving(l.ask("ada", 4)), reserving(l.ask("ada", 3)),
		reserving(l.ask("ada", 1), l.ask("eve", 1)), reserving(l.ask("bob", 1), l.ask("eve", 2)),
	}
	s.batch(calls...)
	require.Equal(t, 1, s.pool.trips)
	for i, want := range []bool{true, true, true, false, true, false, true} {
		require.Equal(t, want, calls[i].isAllowed(t), "call %d", i)
		require.Equal(t, want, calls[i].Record != nil, "call %d", i)
	}
	require.Equal(t, []float64{-5, 8, 8}, s.held(l.ask("ada", 0), l.ask("bob", 0), l.ask("eve", 0)))
}

// A call that locks a row and changes it writes it once: each write is logged.
func TestAChangeWritesItsRowOnce(t *testing.T) {
	t.Parallel()
	s, l := newStand(t), still("still", 10)
	s.makeRows("ada", l)
	asks := []bucket.Ask{l.ask("ada", 1)}
	charge := func(amount float64) func(in *Session) error {
		return func(in *Session) error {
			return in.Charge(t.Context(), Charge{asks, []float64{amount}, []int64{bucket.Whenever}})
		}
	}
	for _, change := range []func(in *Session) error{
		charge(3), charge(-1), func(in *Session) error { return in.Fill(t.Context(), asks) },
	} {
		tx := s.tx()
		written := func() (n int) {
			require.NoError(t, tx.QueryRow(t.Context(), `SELECT coalesce(sum(n_tup_ins + n_tup_upd), 0) FROM pg_stat_xact_user_tables
				WHERE schemaname = 'ratelimit' AND relname = 'buckets'`).Scan(&n))
			return n
		}
		in, before := s.InTx(tx, owner{s.pool}, nil), written()
		require.NoError(t, change(&in))
		require.Equal(t, before+1, written())
		require.NoError(t, tx.Rollback(t.Context()))
	}
}

// listener is an owner that counts the calls of the batches it's told of.
type listener struct {
	owner

	batched *int
}

func (l listener) Batched(_ context.Context, calls int, _ time.Duration) { *l.batched += calls }

// Charges, credits and resets of a batch are one round trip, beside which other calls are decided. One whose row
// another transaction holds waits alone, and holds no other row meanwhile.
func TestChangesOfABatchAreOneRoundTrip(t *testing.T) {
	t.Parallel()
	s, l := newStand(t), still("still", 10)
	changing := func(key, verb string, amount float64) *Call {
		c := &Call{Question: Question{Verb: verb, Asks: []bucket.Ask{l.ask(key, 0)}}}
		c.changes = []change{{ask: &c.Asks[0], verb: verb, amount: amount, taken: bucket.Whenever}}
		return c
	}
	s.batch(changing("a", "charge", 8), changing("b", "charge", 12))
	batched := 0
	s.owner = listener{owner{s.pool}, &batched}
	s.pool.trips = 0
	s.batch(changing("a", "credit", 3), changing("b", "fill", 0), changing("a", "charge", 1))
	require.Equal(t, 1, s.pool.trips)
	require.Equal(t, 3, batched)
	require.Equal(t, []float64{4, 10}, s.held(l.ask("a", 0), l.ask("b", 0)))

	takes := taking(l.ask("a", 4))
	s.batch(changing("a", "charge", 1), takes, changing("b", "charge", 1))
	require.False(t, takes.isAllowed(t))
	require.Equal(t, []float64{3, 9}, s.held(l.ask("a", 0), l.ask("b", 0)))

	s.tx(`SELECT FROM ratelimit.buckets WHERE key = 'b' FOR UPDATE`)
	calls := []*Call{changing("a", "charge", 1), changing("b", "charge", 1)}
	waiting := s.Session.Run(t.Context(), calls, nil)
	require.Len(t, waiting, 1)
	require.Equal(t, l.ask("b", 0).Key, waiting[0].Row)
	require.Equal(t, []float64{2, 9}, s.held(l.ask("a", 0), l.ask("b", 0)))

	both := changing("b", "charge", 1)
	both.Asks = append(both.Asks, l.ask("c", 0))
	both.changes = changesOf([]Charge{{Asks: both.Asks, Amounts: []float64{1, 1}, Taken: []int64{bucket.Whenever, bucket.Whenever}}})
	waiting = s.Session.Run(t.Context(), []*Call{both}, nil)
	require.Len(t, waiting, 1)
	require.Equal(t, l.ask("b", 0).Key, waiting[0].Row)
}
