package reserved

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// opening is the instant at which the tests decide.
const opening = 1_600_000_000_000_000

// record returns the reservation that keep makes.
func record(t *testing.T, keep Keeping, asks []bucket.Ask, answers []bucket.Answer) *Reservation {
	t.Helper()
	r, ok := keep.Record(asks, answers).(*Reservation)
	require.True(t, ok)
	return r
}

// A reservation is ready when the slowest of its limits owes nothing any more, and not before the end of a pause. Each bucket
// gives back to the step in which it owed nothing itself.
func TestAReservationIsReadyOnceItsTokensAreRepaid(t *testing.T) {
	t.Parallel()
	terms := bucket.Terms{Kind: bucket.Steps{}, Capacity: 10, Rate: 1, Steps: 1, Step: 1_000_000, MaxOwed: 10, Reserves: true}
	asks, answers := make([]bucket.Ask, 2), make([]bucket.Answer, 2)
	for i, owed := range []float64{5, 2} {
		asks[i] = bucket.Ask{Key: bucket.Key{Name: "slots", Key: []string{"ada", "bob"}[i]}, Terms: terms, Cost: 1, Lowest: -10}
		answers[i] = bucket.Answer{Allowed: true, Now: opening, State: bucket.State{Value: -owed, TS: opening}}
	}
	ready := opening + 5*time.Second.Microseconds()
	require.Equal(t, ready, record(t, Keeping{}, asks, answers).ReadyUs)
	r := record(t, Keeping{NotBefore: ready + 1}, asks, answers)
	require.Equal(t, ready+1, r.ReadyUs)
	require.Equal(t, []int64{ready, opening + 2*time.Second.Microseconds()}, r.Charge(r.Credit()).Taken)
}

// row is a row that was scanned from the parameters of the statement that saved it.
type row struct{ values []any }

func (r row) Scan(targets ...any) error {
	for i, target := range targets {
		switch target := target.(type) {
		case *[]string:
			*target, _ = r.values[i].([]string)
		case *[]float64:
			*target, _ = r.values[i].([]float64)
		case *[]int64:
			*target, _ = r.values[i].([]int64)
		case *[]int32:
			*target, _ = r.values[i].([]int32)
		case *int64:
			*target, _ = r.values[i].(int64)
		}
	}
	return nil
}

// A row says all of a bucket. A row from before a column was added has the values of that time: one row for each bucket, no plan
// and no calendar, and paid when it was ready.
func TestARowContainsTheWholeBucket(t *testing.T) {
	t.Parallel()
	full := Reserved{
		Key: bucket.Key{Name: "slots", Key: "ada", Shard: 10}, Plan: "pro", Cost: 2, Capacity: 3, Rate: 5, Steps: 6, Lowest: -7, StepUs: 8, PhaseUs: 9,
		Calendar: "1 0 0 0 UTC", PaidUs: 11,
	}
	other := full
	other.Key.Key, other.Cost = "bob", 12
	saved := Reservation{ReadyUs: opening, Buckets: []Reserved{full, other}}
	values := saved.parameters()[1:]
	var read Reservation
	require.NoError(t, read.scan(row{values}))
	require.Equal(t, saved.Buckets, read.Buckets)

	first := len(values) - len(columns())
	usual := Reservation{ReadyUs: opening, Buckets: []Reserved{full}}
	b := &usual.Buckets[0]
	b.Key.Shard, b.Plan, b.Calendar = 0, "", ""
	for _, left := range usual.parameters()[1+first+9 : 1+first+12] {
		require.Empty(t, left, "the usual takes no room in the row")
	}
	require.NoError(t, read.scan(row{usual.parameters()[1:]}))
	require.Equal(t, usual.Buckets, read.Buckets)
	for _, added := range []int{9, 10, 11, 12} { // shards, plans, calendars, paid_us
		values[first+added] = nil
	}
	require.NoError(t, read.scan(row{values}))
	full.Key.Shard, full.Plan, full.Calendar, full.PaidUs = 0, "", "", opening
	require.Equal(t, full, read.Buckets[0])
}
