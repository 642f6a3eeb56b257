package bucket_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

const second = int64(1_000_000)

// tenInAMinute gives ten in any minute, and counts in slices of ten seconds.
var tenInAMinute = slidingTerms(10, 10*second, 6)

// After another kind of limit, or an older program, the tokens missing to the capacity count as taken in the slice of ts.
func TestSlidingGoesOnFromTheValueOfAnotherKind(t *testing.T) {
	t.Parallel()
	slid, _ := buckettest.Take(tenInAMinute, tenInAMinute.Full(opening), opening, 2, 0)
	slid, _ = buckettest.Take(tenInAMinute, slid, opening+20*second, 1, 0)
	for name, test := range map[string]struct {
		change func(s *bucket.State)
		tokens float64
		full   time.Duration // from 30 s on
	}{
		"Nothing":     {func(*bucket.State) {}, 7, time.Minute},
		"ABucketTook": {func(s *bucket.State) { s.Value, s.TS = 3, opening+31*second }, 3, 70 * time.Second},
		"ABucketGave": {func(s *bucket.State) { s.Value, s.TS = 9, opening+31*second }, 9, 70 * time.Second},
		"ABucketOwes": {func(s *bucket.State) { s.Value = -5 }, -5, time.Minute},
		"NoSlices":    {func(s *bucket.State) { s.Parts = nil }, 7, time.Minute},
		"OfABucket":   {func(s *bucket.State) { *s = bucket.State{Value: 4, TS: opening + 15*second} }, 4, 50 * time.Second},
		"More":        {func(s *bucket.State) { *s = bucket.State{Value: 400, TS: opening} }, 10, 0},
		"Leases":      {func(s *bucket.State) { s.Parts = &bucket.Parts{Leases: []int64{1}} }, 7, time.Minute},
		"Nonsense":    {func(s *bucket.State) { s.Parts = &bucket.Parts{Taken: []float64{0, s.Value, 3, 0}} }, 7, time.Minute},
	} {
		s, now := slid, opening+30*second
		test.change(&s)
		require.InDelta(t, test.tokens, buckettest.Tokens(tenInAMinute, s, now), 0, name)
		require.Equal(t, test.full, buckettest.UntilFull(tenInAMinute, s, now), name)
	}
}

// A credit also reaches tokens taken under the policy before, if they carried over with the change.
func TestSlidingCreditsAcrossAChange(t *testing.T) {
	t.Parallel()
	const from = opening + 45*second
	for name, before := range map[string]bucket.Terms{
		"ASlidingWindow": slidingTerms(10, 30*second, 2), "ATokenBucket": buckettest.TokenBucket(10, 24*time.Hour, 10),
	} {
		terms := changeAt(from, before, tenInAMinute, bucket.Keep)
		s, allowed := buckettest.Take(before, before.Full(opening), opening+5*second, 6, 0)
		require.True(t, allowed, name)
		s = terms.Settle(s)
		require.InDelta(t, 4, buckettest.Tokens(terms, s, from), 0.01, name)
		s = buckettest.Credit(terms, s, from+second, 2, buckettest.CreditUntil(terms, opening+5*second))
		require.InDelta(t, 6, buckettest.Tokens(terms, s, from+second), 0.01, name)
	}
}

// Tokens reserved under another kind, and not ready when the kind changed, can be returned while the slice of the change counts.
func TestSlidingCreditsWhatAnotherKindReserved(t *testing.T) {
	t.Parallel()
	const hour = 3600 * second
	tokens, sliding, change := buckettest.TokenBucket(20, 24*time.Hour, 20), slidingTerms(20, hour, 24), opening+2*hour
	byRule := changeAt(change, tokens, sliding, bucket.Keep)
	reserved := bucket.State{Value: -10, TS: opening} // by 15 and 15
	for name, test := range map[string]struct {
		terms         bucket.Terms
		before, after float64 // three hours after the change
	}{
		"InTheCode": {sliding, -10, 5}, "ByARule": {byRule, -10 + 2*20/24., 5 + 2*20/24.},
	} {
		settled, now := test.terms.Settle(reserved), change+3*hour
		require.InDelta(t, test.before, buckettest.Tokens(test.terms, settled, now), 1e-9, name)
		for _, ready := range []int64{opening, opening + 12*hour} {
			s := buckettest.Credit(test.terms, settled, now, 15, buckettest.CreditUntil(test.terms, ready))
			require.InDelta(t, test.after, buckettest.Tokens(test.terms, s, now), 1e-9, name)
		}
		now = change + 26*hour // the change counts no more
		s, allowed := buckettest.Take(test.terms, settled, now, 20, 0)
		require.True(t, allowed, name)
		s = buckettest.Credit(test.terms, s, now, 15, buckettest.CreditUntil(test.terms, opening+30*hour))
		require.InDelta(t, 0, buckettest.Tokens(test.terms, s, now), 0, name)
	}
}

// A wait ends at the latest when all entries of the row have expired, also if a sum of fractions is rounded up.
func TestSlidingWaitOfFractions(t *testing.T) {
	t.Parallel()
	terms := slidingTerms(1/3., 60*second, 60)
	s := terms.Kind.Charge(terms, terms.Full(opening), opening, 2)
	now := opening + 30*60*second
	wait := buckettest.Wait(terms, s, now, 1/3., 0)
	require.Equal(t, 31*time.Minute, wait)
	_, before := buckettest.Take(terms, s, now+wait.Microseconds()-1, 1/3., 0)
	_, allowed := buckettest.Take(terms, s, now+wait.Microseconds(), 1/3., 0)
	require.Equal(t, []bool{false, true}, []bool{before, allowed})
}

// Rows are full for certain after Idle, counted from the end of the slice of ts.
func TestSlidingIdle(t *testing.T) {
	t.Parallel()
	for _, terms := range []bucket.Terms{tenInAMinute, slidingTerms(10, 60*second, 1)} {
		s, _ := buckettest.Take(terms, terms.Full(opening), opening+terms.Step-1, 10, 0)
		pruning := terms.Kind.Pruning(terms)
		require.Equal(t, bucket.Steps{}, pruning.Kind)
		require.InDelta(t, 10, buckettest.Tokens(terms, s, s.TS+pruning.Step), 0)
	}
}

// Totals do not grow with every take.
func TestSlidingTotalsStaySmall(t *testing.T) {
	t.Parallel()
	terms := slidingTerms(0.7, 10*second, 6)
	s, most := terms.Full(opening), 0.0
	for i := range testsize.Of[int64](2_000, 30_000) {
		now := opening + i*7*second
		s, _ = buckettest.Take(terms, s, now, 0.1, 0)
		most = max(most, s.Parts.Taken[2])
	}
	require.Greater(t, most, 64*0.7)
	require.Less(t, most, 66*0.7)
}
