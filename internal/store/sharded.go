package store

import (
	"slices"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// pickRows returns the asks with one row in place of each bucket that is spread over several. It returns nil if a row can never
// hold the cost.
func pickRows(asks []bucket.Ask, seed uint64) []bucket.Ask {
	rows := slices.Clone(asks)
	for i := range rows {
		a := &asks[i]
		if !a.Sharded() {
			continue
		}
		if rows[i] = a.OfShard(int32(seed % uint64(a.Terms.Shards))); a.Cost > rows[i].Terms.Capacity {
			return nil
		}
		rows[i].Cost = a.Cost
	}
	return rows
}

// fromRows turns the answers for the rows that pickRows has returned into answers for the buckets. They are undecided if a row refuses whose
// bucket has others.
func fromRows(asks, rows []bucket.Ask, answers []bucket.Answer) (undecided bool) {
	taken := bucket.AllAllowed(answers)
	for i := range asks {
		if a := &asks[i]; a.Sharded() {
			undecided = undecided || !answers[i].Allowed
			answers[i] = rows[i].Estimate(answers[i], a.Terms.Shards, taken)
		}
	}
	return undecided
}
