package reserved

import (
	"math"
	"reflect"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
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

// A reservation is ready when the slowest of its limits owes nothing any more, and not before the end of a pause. Each
// bucket gives back to the step in which it owed nothing itself.
func TestAReservationIsReadyOnceItsTokensAreRepaid(t *testing.T) {
	t.Parallel()
	terms := bucket.Terms{Kind: bucket.Steps{}, Capacity: 10, Rate: 1, Steps: 1, Step: 1_000_000, MaxDebt: 10, Reserves: true}
	asks, answers := make([]bucket.Ask, 2), make([]bucket.Answer, 2)
	for i, owed := range []float64{5, 2} {
		asks[i] = bucket.Ask{Key: bucket.Key{Name: "slots", Key: []string{"ada", "bob"}[i]}, Terms: terms, Cost: 1, MinBalance: -10}
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
		reflect.ValueOf(target).Elem().Set(reflect.ValueOf(r.values[i]))
	}
	return nil
}

// A row says all of its buckets, to the last bit.
func TestARowContainsTheWholeBucket(t *testing.T) {
	t.Parallel()
	full := Reserved{
		Key: bucket.Key{Name: "slots", Key: "ada", Shard: 10}, Plan: "pro", Cost: 2, Capacity: 3, Rate: 5, Steps: 6, Lowest: -7, StepUs: 8, PhaseUs: 9,
		Calendar: "1 0 0 0 UTC", PaidUs: 11, Owed: 1. / 3, Settled: new(1e21),
	}
	other := full
	other.Key.Key, other.Cost, other.Settled = "b\"ob", 5e-324, new(math.MaxFloat64)
	usual := full
	usual.Shard, usual.Plan, usual.Calendar, usual.Settled = 0, "", "", nil
	for _, buckets := range [][]Reserved{{full, other, usual}, {usual, full}, {usual}} {
		saved := Reservation{ReadyUs: opening, Buckets: buckets}
		var read Reservation
		require.NoError(t, read.scan(row{saved.parameters()[1:]}))
		require.Equal(t, buckets, read.Buckets)
	}
}
