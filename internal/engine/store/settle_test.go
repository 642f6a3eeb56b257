package store

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// Calls of a batch that end reservations are one round trip. An unknown one is not done. Nor is one whose row another
// transaction holds: it's decided by itself.
func TestSettlementsOfABatchAreOneRoundTrip(t *testing.T) {
	t.Parallel()
	s, l := newStand(t), still("still", 10)
	id := func(n int) string { return fmt.Sprintf("00000000-0000-4000-8000-%012d", n) }
	for n, key := range []string{"a", "b", "a", "b"} {
		s.exec(`SELECT ratelimit.reserve_1($1, 'still', $2, 0, 3, $3, $4, $5, $6, $7, 0, NULL, NULL, $8, true, NULL, NULL, 0, NULL, 1000000, false, true)`,
			id(n), key, l.terms.Capacity, l.terms.Rate, l.terms.Steps, l.terms.Step, l.terms.Phase, s.now)
	}
	settling := func(n int, key string, cost float64) *Call {
		a := l.ask(key, 0)
		return &Call{
			Question:   Question{Verb: "settle", Asks: []bucket.Ask{{Key: a.Key}}},
			Settlement: &Settlement{ID: id(n), Final: "settled", Bucket: &a.Key, Cost: &cost, Terms: &a.Terms},
		}
	}
	settle := func(calls ...*Call) (answers []Ended) {
		s.pool.trips = 0
		s.batch(calls...)
		require.Equal(t, 1, s.pool.trips)
		for _, c := range calls {
			require.NoError(t, c.Result())
			answers = append(answers, c.Settlement.Ended)
		}
		return answers
	}
	a, b := l.ask("a", 0), l.ask("b", 0)
	require.Equal(t, []Ended{
		{Done: true, State: "open", Amount: 1, Key: b.Key}, {Done: true, State: "open", Amount: -2, Key: a.Key}, {},
	}, settle(settling(1, "b", 4), settling(0, "a", 1), settling(7, "a", 1)))
	require.Equal(t, []float64{6, 3}, s.held(a, b))

	s.tx(`SELECT FROM ratelimit.buckets WHERE key = 'b' FOR UPDATE`)
	answers := settle(settling(2, "a", 1), settling(3, "b", 1))
	require.Equal(t, Ended{Done: true, State: "open", Amount: -2, Key: a.Key}, answers[0])
	require.False(t, answers[1].Done)
	require.Equal(t, []float64{8, 3}, s.held(a, b))
	require.Equal(t, []Ended{{Done: true, State: "settled", Key: a.Key}, {Done: true, State: "settled", Key: a.Key}},
		settle(settling(2, "a", 1), settling(0, "a", 2)))
	takes := taking(l.ask("a", 8))
	s.batch(settling(2, "a", 3), takes)
	require.True(t, takes.isAllowed(t))
}

// A reservation of several buckets is settled in the same round trip. A bucket that was reset since then gets nothing
// back, and a limit that is off is not charged.
func TestSeveralBucketsAreSettledWithABatch(t *testing.T) {
	t.Parallel()
	s, l := newStand(t), still("still", 10)
	const one, several = "00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002"
	for _, id := range []string{one, several} {
		s.exec(`SELECT ratelimit.reserve_1($1, 'still', 'a', 0, 3, $2, $3, $4, $5, $6, 0, NULL, NULL, $7, true, NULL, NULL, 0, NULL, 1000000, false, true)`,
			id, l.terms.Capacity, l.terms.Rate, l.terms.Steps, l.terms.Step, l.terms.Phase, s.now)
	}
	var asks []bucket.Ask
	for _, key := range []string{"a", "b", "c"} {
		asks = append(asks, l.ask(key, 3))
		if key != "a" {
			s.allows(taking(asks[len(asks)-1]))
		}
	}
	s.exec(`UPDATE ratelimit.reservations SET paid_us = $2, others = jsonb_build_array(
			to_jsonb(reservations) || jsonb_build_object('key', 'b', 'paid_us', $2::bigint), to_jsonb(reservations) || '{"key": "c"}')
		WHERE id = $1`, several, s.now-2000)
	reset := bucket.NewRevisions([]bucket.Revision{
		{Terms: l.terms}, {From: s.now - 1000, Terms: l.terms, Change: bucket.Reset},
	}).Holding(s.now)

	q := &Settlement{ID: several, Final: "settled", Several: true, Bucket: &asks[0].Key, Costs: []ActualCost{
		{Key: asks[0].Key, Cost: 1, Terms: &l.terms}, {Key: asks[1].Key, Cost: 1, Terms: &reset}, {Key: asks[2].Key, Cost: 7, Free: true, Terms: &l.terms},
	}}
	calls := []*Call{
		{Question: Question{Asks: asks}, Settlement: q},
		{Question: Question{Asks: asks[:1]}, Settlement: &Settlement{ID: one, Final: "settled", Bucket: &asks[0].Key, Cost: new(4.0), Terms: &l.terms}},
	}
	s.pool.trips = 0
	s.batch(calls...)
	require.Equal(t, 1, s.pool.trips)
	for _, c := range calls {
		require.NoError(t, c.Result())
		require.True(t, c.Settlement.Ended.Done)
	}
	require.Equal(t, []Charged{{asks[1].Key, -2}, {asks[2].Key, 0}}, q.Ended.Others)
	require.Equal(t, []float64{10 - 4 - 1, 10 - 3, 10 - 3}, s.held(asks...))
}
