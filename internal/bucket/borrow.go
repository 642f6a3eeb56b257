package bucket

import (
	"cmp"
	"slices"
	"time"
)

// An ask with a Lender is paid from its own bucket if that has enough, and otherwise from the lender's bucket:
//
//	own pays      when own >= cost;   own' = own - cost, lender' = lender - cost, which may be below 0
//	lender pays   when own < cost and lender >= cost;       lender' = lender - cost
//
// So the lender holds the tokens that are left in total, and an ask with enough tokens of its own never waits for it. Let the rates
// of the own buckets add up to at most the lender's rate. The lender pays only while it holds 0 or more. After that, all tokens
// come from own buckets. So in any span t all asks together take
//
//	taken <= lender's capacity + sum of own capacities + lender's rate * t
//
// If a call has several such asks, the lender first pays for the asks with too few tokens and for direct asks, and then is charged
// for the others. The order of the asks does not matter.

// borrowsFrom reports whether o is the lender of a.
func (a *Ask) borrowsFrom(o *Ask) bool { return a.Lender != nil && *a.Lender == o.Key }

// lend has lenders pay for those asks that their own buckets have refused. tokens returns what the i-th bucket holds.
func lend(asks []Ask, answers []Answer, tokens func(i int) float64) {
	for i := range asks {
		if a := &asks[i]; a.Lender != nil && !answers[i].Allowed && !slices.ContainsFunc(asks, func(o Ask) bool { return a.borrowsFrom(&o) }) {
			answers[i].Allowed, answers[i].Borrowed = true, true // the lender limits no request, so it is not checked
		}
	}
	for p := range asks {
		lender, borrowed := &asks[p], 0.0
		var borrowers []int
		for i := range asks {
			if asks[i].borrowsFrom(lender) && !answers[i].Allowed {
				borrowers, borrowed = append(borrowers, i), borrowed+asks[i].Cost
			}
		}
		if len(borrowers) == 0 {
			continue
		}
		answers[p].Allowed = answers[p].Allowed && tokens(p)-(lender.Cost+borrowed) >= 0
		for _, i := range borrowers {
			answers[i].Allowed, answers[i].Borrowed = answers[p].Allowed, answers[p].Allowed
		}
	}
}

// lent returns the amount that the i-th bucket is charged for the asks that borrow from it, also if their own bucket pays.
func lent(asks []Ask, i int) (amount float64) {
	for j := range asks {
		if asks[j].borrowsFrom(&asks[i]) {
			amount += asks[j].Cost
		}
	}
	return amount
}

// BorrowWaits returns the wait of each refused ask that lends or borrows: until the lender can pay all direct asks and all borrowers
// together. For other asks it is 0.
func BorrowWaits(asks []Ask, answers []Answer) []time.Duration {
	waits := make([]time.Duration, len(asks))
	for p := range asks {
		if answers[p].Allowed {
			continue
		}
		var own []borrower
		for i := range asks {
			if asks[i].borrowsFrom(&asks[p]) {
				own = append(own, borrower{i, answers[i].wait(&asks[i].Terms, asks[i].Cost, asks[i].Lowest)})
			}
		}
		wait := togetherAfter(asks, answers, p, own)
		for _, o := range own {
			if !answers[o.ask].Allowed {
				waits[o.ask], waits[p] = wait, wait
			}
		}
	}
	return waits
}

// borrower is an ask, and how long it takes until its own bucket has enough.
type borrower struct {
	ask  int
	wait time.Duration
}

// togetherAfter returns how long it takes until the p-th bucket has enough tokens for the borrowers whose own buckets still have
// too few.
func togetherAfter(asks []Ask, answers []Answer, p int, own []borrower) time.Duration {
	slices.SortFunc(own, func(a, b borrower) int { return cmp.Compare(b.wait, a.wait) })
	needed, lowest := asks[p].Cost, asks[p].Lowest
	shortest := time.Duration(Horizon) * time.Microsecond
	for n := 0; n <= len(own); n++ { // the n that wait longest are paid for by the lender
		wait := answers[p].wait(&asks[p].Terms, needed, lowest)
		if n < len(own) {
			wait = max(wait, own[n].wait)
			needed, lowest = needed+asks[own[n].ask].Cost, 0
		}
		shortest = min(shortest, wait)
	}
	return shortest
}
