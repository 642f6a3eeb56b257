//go:build unix

package torture_test

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// tolerance is the rounding error allowed in sums, in tokens. Costs are whole numbers.
const tolerance = 1e-3

// audit compares the histories with the tables when all is over.
type audit struct {
	catalog *catalog
	ledger  *ledger
	conn    *pgx.Conn

	work  map[place][]item
	taken map[place]float64 // as the rows of the buckets say, of limits whose rows do
	wrong []string
}

func (a *audit) failf(format string, arguments ...any) {
	a.wrong = append(a.wrong, fmt.Sprintf(format, arguments...))
}

// run makes all checks. It returns the error of a query; findings are in a.wrong.
func (a *audit) run(ctx context.Context) error {
	for _, check := range []func(context.Context) error{a.checkTransactions, a.readRows, a.checkReservations} {
		if err := check(ctx); err != nil {
			return err
		}
	}
	a.checkRows()
	a.checkSpans()
	a.checkSlots()
	return nil
}

// checkTransactions compares the rows that transactions inserted for their takes with the answers to their callers. All
// rows of an acknowledged transaction exist, and no row of a failed one.
func (a *audit) checkTransactions(ctx context.Context) error {
	rows, err := a.conn.Query(ctx, `SELECT call, name, key, tokens, lo, hi FROM public.work`)
	if err != nil {
		return err
	}
	a.work = map[place][]item{}
	worked := map[string]map[place]float64{}
	var call string
	var of item
	_, err = pgx.ForEachRow(rows, []any{&call, &of.Name, &of.Key, &of.Tokens, &of.Lo, &of.Hi}, func() error {
		a.work[of.place] = append(a.work[of.place], of)
		entered(worked, call, map[place]float64{})[of.place] += of.Tokens
		return nil
	})
	for call, of := range worked {
		switch tx := a.ledger.txs[call]; {
		case tx == nil:
			a.failf("transactions: %s took %v and is in no history", call, of)
		case tx.Outcome == failed || tx.Outcome == refused:
			a.failf("transactions: %s (%s, from %d to %d) is said to have %s, and took %v: %s", call, tx.Path, tx.Begin, tx.End, tx.Outcome, of, tx.Note)
		}
	}
	for call, tx := range a.ledger.txs {
		told := map[place]float64{}
		for _, of := range tx.Items {
			told[of.place] += of.Tokens
		}
		if tx.Outcome == allowed && !maps.Equal(told, worked[call]) {
			a.failf("transactions: %s (%s, from %d to %d) is acknowledged to have taken %v, and its rows of work say %v", call, tx.Path, tx.Begin, tx.End, told, worked[call])
		}
	}
	return err
}

// readRows reads the tokens taken from buckets that gain nothing: their initial value minus their current value.
func (a *audit) readRows(ctx context.Context) error {
	rows, err := a.conn.Query(ctx, `SELECT name, key, count(*), sum(value) FROM ratelimit.buckets GROUP BY name, key`)
	if err != nil {
		return err
	}
	a.taken = map[place]float64{}
	var at place
	var count, held float64
	_, err = pgx.ForEachRow(rows, []any{&at.Name, &at.Key, &count, &held}, func() error {
		if s := a.catalog.took[at.Name]; s != nil && s.capacity > 0 {
			if p, ok := s.Policy().(ratelimit.TokenBucket); ok {
				count /= float64(max(1, p.Shards)) // a row that is not there is full
			}
			a.taken[at] = s.capacity*count - held
		}
		return nil
	})
	return err
}

// checkRows compares the tokens missing in the rows of buckets with the calls. At least the acknowledged tokens and the
// tokens in rows of work are missing; at most these plus the tokens of calls with an unknown outcome. There are no
// halves of calls over two limits.
func (a *audit) checkRows() {
	places := map[place]bool{}
	for _, all := range [][]place{slices.Collect(maps.Keys(a.ledger.accounts)), slices.Collect(maps.Keys(a.work)), slices.Collect(maps.Keys(a.taken))} {
		for _, at := range all {
			places[at] = true
		}
	}
	for at := range places {
		s := a.catalog.took[at.Name]
		if s == nil || s.capacity == 0 || s.ofReservations {
			continue
		}
		work := 0.0
		for _, of := range a.work[at] {
			work += of.Tokens
		}
		account := a.ledger.account(at)
		known, taken, since := work+account.took, a.taken[at], arrived(s.capacity, a.catalog.began)
		if taken+since < known-account.less-tolerance || taken > known+account.more+tolerance {
			a.failf("rows: of %v %v are taken; acknowledged are %v and the rows of work say %v more, of unknown outcome are %v, and %v given back",
				at, taken, account.took, work, account.more, account.less)
		}
		if taken > s.capacity+tolerance {
			a.failf("rows: of %v %v are taken, and it held %v", at, taken, s.capacity)
		}
		if other := a.taken[place{"pairB", at.Key}]; at.Name == "pairA" && math.Abs(taken-other) > tolerance+since {
			a.failf("pairs: of %v %v are taken, and of the limit that is always taken with it %v", at, taken, other)
		}
	}
}

// checkReservations compares the tokens missing in buckets that only reservations take from with the stored
// reservations, and these with the answers to their callers.
func (a *audit) checkReservations(ctx context.Context) error {
	rows, err := a.conn.Query(ctx, `SELECT id::text, state, release, name, key, cost FROM ratelimit.reservations
		UNION ALL SELECT id::text, state, release, o ->> 'name', o ->> 'key', (o ->> 'cost')::float8
		FROM ratelimit.reservations, jsonb_array_elements(others) AS o`)
	if err != nil {
		return err
	}
	charged := map[place]float64{}
	there := map[string]string{}
	var id, state string
	var release bool
	var at place
	var cost float64
	_, err = pgx.ForEachRow(rows, []any{&id, &state, &release, &at.Name, &at.Key, &cost}, func() error {
		there[id] = state
		if r := a.ledger.reservations[id]; r != nil && state == string(ratelimit.Settled) {
			if j := slices.IndexFunc(r.actual, func(of item) bool { return of.place == at }); j >= 0 {
				cost = r.actual[j].Tokens
			}
		}
		if state != string(ratelimit.Cancelled) && (state != string(ratelimit.Expired) || !release) {
			charged[at] += cost
		}
		return nil
	})
	for at, taken := range a.taken {
		if a.catalog.took[at.Name].ofReservations && math.Abs(taken-charged[at]) > tolerance+arrived(plenty, a.catalog.began) {
			a.failf("reservations: of %v %v are taken, and its reservations cost %v", at, taken, charged[at])
		}
	}
	for id, r := range a.ledger.reservations {
		switch state, ok := there[id]; {
		case !ok && r.acknowledged:
			a.failf("reservations: %s is acknowledged, and is not there", id)
		case r.settled && state != string(ratelimit.Settled), r.cancelled && !r.renewed && state != string(ratelimit.Cancelled):
			a.failf("reservations: %s is acknowledged to be settled (%v) or cancelled (%v), and is %s", id, r.settled, r.cancelled, state)
		}
	}
	return err
}

// checkSpans looks, for each bucket, at every span of time.
func (a *audit) checkSpans() {
	for at, account := range a.ledger.accounts {
		s := a.catalog.took[at.Name]
		if s.bound == nil || s.ofReservations {
			continue
		}
		worst := worstSpan(slices.Concat(account.admitted, a.work[at]), s.bound)
		if worst.by > tolerance+arrived(s.capacity, a.catalog.began) {
			a.failf("spans: of %v, which gives %s, was admitted %.6f too much from %d to %d", at, s.Policy(), worst.by, worst.from, worst.to)
		}
	}
}

// excess is the span in which most was admitted beyond the bound; by is below 0 where that was kept.
type excess struct {
	by       float64
	from, to int64
}

// worstSpan looks at every span [from, to], and returns the one in which the admitted items exceed the bound by most.
// An item with taken tokens counts in a span that contains all of [Lo, Hi], because it may have taken them anywhere in
// between. An item with returned tokens counts in each span that contains any part of it.
func worstSpan(items []item, b *bound) (worst excess) {
	worst.by = math.Inf(-1)
	var froms []int64
	longest := b.within - 1
	for i := range items {
		of := &items[i]
		if of.Tokens < 0 {
			of.Lo, of.Hi = of.Hi, of.Lo // it counts from Hi on, in spans from no later than Lo
			continue
		}
		froms = append(froms, of.Lo)
		longest = max(longest, of.Hi-of.Lo)
	}
	slices.Sort(froms)
	froms = slices.Compact(froms)
	sums := make([]float64, len(froms)) // tokens admitted since each instant, plus tokens that arrived before it
	for i, from := range froms {
		sums[i] = b.arrived(from)
	}
	slices.SortFunc(items, func(a, b item) int {
		return cmp.Or(cmp.Compare(a.Hi, b.Hi), cmp.Compare(a.Tokens, b.Tokens)) // returned tokens count first
	})
	early := excess{by: math.Inf(-1)} // the largest of the first sums, for which every later item counts
	merged := 0
	for _, of := range items {
		for ; merged < len(froms) && froms[merged] < of.Hi-longest; merged++ {
			if sums[merged] > early.by && b.within == 0 {
				early = excess{by: sums[merged], from: froms[merged]}
			}
		}
		early.by += of.Tokens
		for i := merged; i < len(froms) && froms[i] <= of.Lo; i++ {
			sums[i] += of.Tokens
		}
		if of.Tokens < 0 {
			continue
		}
		most := early
		for i := merged; i < len(froms) && froms[i] <= of.Hi; i++ {
			if sums[i] > most.by && (b.within == 0 || of.Hi-froms[i] < b.within) {
				most = excess{by: sums[i], from: froms[i]}
			}
		}
		if most.by -= b.arrived(of.Hi) + b.capacity; most.by > worst.by {
			worst = excess{by: most.by, from: most.from, to: of.Hi}
		}
	}
	return worst
}

// checkSlots looks whether more slots were held at once than there are.
func (a *audit) checkSlots() {
	for at, account := range a.ledger.accounts {
		var changes []item
		for _, of := range account.held {
			changes = append(changes, item{Hi: of.Lo, Tokens: of.Tokens}, item{Hi: of.Hi, Tokens: -of.Tokens})
		}
		slices.SortFunc(changes, func(a, b item) int { return cmp.Or(cmp.Compare(a.Hi, b.Hi), cmp.Compare(a.Tokens, b.Tokens)) })
		held := 0.0
		for _, c := range changes {
			if held += c.Tokens; held > mostSlots {
				a.failf("slots: of %v %v are held at %d, and it has %d", at, held, c.Hi, mostSlots)
				break
			}
		}
	}
}
