package store

import (
	"context"
	"slices"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// takeSharded takes from buckets of which some are spread over several rows: from one row of each, or else from another
// one of each. It is undecided where only all of them together may have enough. An attempt that is refused leaves no row locked, because the
// next attempt may lock rows that come before those.
func (s *Session) takeSharded(ctx context.Context, asks []bucket.Ask) (answers []bucket.Answer, undecided bool, err error) {
	all, from := bucket.RowsOf(asks)
	seed := s.seed()
	for attempt := range 2 {
		rows := pickShards(asks, seed, attempt)
		if rows == nil {
			break
		}
		answers, found, undecided, err := s.takeRows(ctx, rows, all)
		if err != nil || undecided {
			return nil, undecided, err
		}
		settleRows(all, found)
		taken, certain := bucket.AllAllowed(answers), len(found) > 0 || isCertain(asks, answers)
		fromRows(asks, rows, answers, found, from)
		if taken || certain && !bucket.AllAllowed(answers) {
			return answers, anyUndecided(asks, answers), nil
		}
	}
	return nil, true, nil
}

// settleRows settles what was found in rows, each for itself.
func settleRows(rows []bucket.Ask, found []bucket.Answer) {
	for i := range found {
		if t := rows[i].Terms; t.Eras != nil {
			found[i].State = t.At(found[i].Now).Settle(found[i].State)
		}
	}
}

// pickShards returns the asks with one row in place of each bucket that is spread over several: at the second attempt
// another row than at the first. It returns nil when the rows have to be asked together: where one could never
// hold the cost, and at the second attempt where the cost may be owed.
func pickShards(asks []bucket.Ask, seed uint64, attempt int) []bucket.Ask {
	rows := slices.Clone(asks)
	for i := range rows {
		a := &rows[i]
		if !a.Sharded() {
			continue
		}
		n := uint64(a.Terms.Shards)
		shard := seed % n
		if attempt > 0 {
			shard = (shard + 1 + seed>>32%(n-1)) % n
		}
		row := a.OfShard(int32(shard))
		if row.Cost = a.Cost; row.Cost > row.Terms.Capacity || attempt > 0 && a.Lowest < 0 {
			return nil
		}
		*a = row
	}
	return rows
}

// fromRows turns the answers for one row of each bucket into answers for the buckets, from the look at all of
// the rows, which begin at from. Where nothing was looked at, each row is taken to hold what the one that was asked held
// before.
func fromRows(asks, rows []bucket.Ask, answers, found []bucket.Answer, from []int) {
	taken := bucket.AllAllowed(answers)
	for i := range asks {
		a, r := &asks[i], &answers[i]
		if !a.Sharded() {
			continue
		}
		row, states := &rows[i], make([]bucket.State, a.Terms.Shards)
		for j := range states {
			states[j] = r.State
			switch {
			case len(found) > 0:
				states[j] = found[from[i]+j].State
			case taken:
				states[j].Value = min(r.State.Value+row.Cost, row.Terms.Capacity)
			}
		}
		if r.Allowed { // where that was undone, the look still saw it
			states[row.Key.Shard] = r.State
		} else if len(found) > 0 {
			r.Now = found[from[i]].Now
		}
		r.SetRows(a, states)
		r.Allowed = r.Allowed || r.State.Value-a.Cost >= a.Lowest
	}
}

// isCertain reports whether the answers for one row of each bucket say which of the buckets refuse: no row refuses
// whose bucket may hold more in others.
func isCertain(asks []bucket.Ask, answers []bucket.Answer) bool {
	for i := range answers {
		if !answers[i].Allowed && asks[i].Sharded() {
			return false
		}
	}
	return true
}
