package bucket

import (
	"cmp"
	"slices"
	"time"
)

// An ask with a Lender is paid from its own bucket when that has enough, and else from that of the lender:
//
//	own pays      when own >= cost;   own' = own - cost, lender' = lender - cost, which may be below 0
//	lender pays   when own < cost and lender >= cost;       lender' = lender - cost
//
// So the lender holds what all have left, and whoever has enough of his own never waits for it. Let the rates of the own
// buckets add up to no more than the lender's. From the last moment at which the lender paid, when it held 0 or more, all
// that is taken is taken from own buckets; so all take, in any span t,
//
//	taken <= lender's capacity + sum of own capacities + lender's rate * t
//
// Of a call with several such asks the lender pays for those that have too little, beside what it is asked directly, and
// then is charged for the others. It does not matter in which order they are asked.

// borrowsFrom reports whether o is the lender of a.
func (a *Ask) borrowsFrom(o *Ask) bool { return a.Lender != nil && *a.Lender == o.Key }

// lend has lenders pay for those asks that their own buckets have refused. tokens returns what the i-th bucket holds.
func lend(asks []Ask, answers []Answer, tokens func(i int) float64) {
	for i := range asks {
		if a := &asks[i]; a.Lender != nil && !answers[i].Allowed && !slices.ContainsFunc(asks, func(o Ask) bool { return a.borrowsFrom(&o) }) {
			answers[i].Allowed, answers[i].Borrowed = true, true // of a lender that is not asked, as it limits nobody
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

// lent returns what the i-th bucket is charged for those that borrow from it, whoever pays.
func lent(asks []Ask, i int) (amount float64) {
	for j := range asks {
		if asks[j].borrowsFrom(&asks[i]) {
			amount += asks[j].Cost
		}
	}
	return amount
}

// BorrowWaits returns, for each ask that was refused and lends or borrows, how long from the answers it takes until what
// was asked of the lender, directly and by all who borrow, can be had together. For the others it is 0.
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

// togetherAfter returns how long it takes until the p-th bucket has enough for those of the borrowers whose own buckets
// have too little by then.
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
