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

// tolerance is the rounding error allowed in sums, in tokens. Costs without a price are whole numbers.
const tolerance = 1e-3

// audit compares the histories with the tables when all is over.
type audit struct {
	catalog *catalog
	ledger  *ledger
	conn    *pgx.Conn

	work  map[place][]item
	taken map[place]float64 // as the rows of the buckets say, of limits whose rows do
	spans int64
	wrong []string

	mayHave, have float64 // tokens that calls of unknown outcome may have taken, and have
	txsDone       int     // transactions of unknown outcome that were committed
}

func (a *audit) failf(format string, arguments ...any) {
	a.wrong = append(a.wrong, fmt.Sprintf(format, arguments...))
}

// run makes all checks. It returns the error of a query; findings are in a.wrong.
func (a *audit) run(ctx context.Context) error {
	for _, check := range []func(context.Context) error{
		a.checkTransactions, a.checkRows, a.checkReservations, a.checkPairs, a.checkSpans, a.checkSlots,
	} {
		if err := check(ctx); err != nil {
			return err
		}
	}
	return nil
}

// checkTransactions compares the rows that transactions inserted for their takes with the answers to their callers. All rows of an
// acknowledged transaction exist, and no row of a failed one.
func (a *audit) checkTransactions(ctx context.Context) error {
	rows, err := a.conn.Query(ctx, `SELECT call, name, key, tokens, lo, hi FROM public.work`)
	if err != nil {
		return err
	}
	a.work = map[place][]item{}
	worked := map[string]map[place]float64{}
	var call string
	var of item
	_, err = pgx.ForEachRow(rows, []any{&call, &of.name, &of.key, &of.tokens, &of.lo, &of.hi}, func() error {
		at := place{of.name, of.key}
		a.work[at] = append(a.work[at], of)
		if worked[call] == nil {
			worked[call] = map[place]float64{}
		}
		worked[call][at] += of.tokens
		return nil
	})
	if err != nil {
		return err
	}
	for call, of := range worked {
		switch tx := a.ledger.txs[call]; {
		case tx == nil:
			a.failf("transactions: %s took %v and is in no history", call, of)
		case tx.outcome == unknown || tx.outcome == begun:
			a.txsDone++
		case tx.outcome == failed || tx.outcome == refused:
			a.failf("transactions: %s (%s, from %d to %d) is said to have %s, and took %v: %s", call, tx.path, tx.begin, tx.end, tx.outcome, of, tx.note)
		}
	}
	for call, tx := range a.ledger.txs {
		if tx.outcome != allowed {
			continue
		}
		told := map[place]float64{}
		for _, of := range tx.items {
			told[place{of.name, of.key}] += of.tokens
		}
		if !maps.Equal(told, worked[call]) {
			a.failf("transactions: %s (%s, from %d to %d) is acknowledged to have taken %v, and its rows of work say %v", call, tx.path, tx.begin, tx.end, told, worked[call])
		}
	}
	return nil
}

// checkRows compares the tokens missing in the rows of buckets with the calls. At least the acknowledged tokens and the tokens in
// rows of work are missing; at most these plus the tokens of calls with an unknown outcome.
func (a *audit) checkRows(ctx context.Context) error {
	if err := a.readRows(ctx); err != nil {
		return err
	}
	a.compareRows()
	return nil
}

func (a *audit) compareRows() {
	places := map[place]bool{}
	for at := range a.ledger.accounts {
		places[at] = true
	}
	for _, at := range slices.Concat(slices.Collect(maps.Keys(a.work)), slices.Collect(maps.Keys(a.taken))) {
		places[at] = true
	}
	for at := range places {
		s := a.catalog.took[at.name]
		if s == nil || s.capacity == 0 || s.ofReservations {
			continue
		}
		work := 0.0
		for _, of := range a.work[at] {
			work += of.tokens
		}
		account := a.ledger.account(item{name: at.name, key: at.key})
		known, taken, since := work+account.took, a.taken[at], arrived(s.capacity, a.catalog.began)
		if taken+since < known-account.less-tolerance || taken > known+account.more+tolerance {
			a.failf("rows: of %v %v are taken; acknowledged are %v and the rows of work say %v more, of unknown outcome are %v, and %v given back",
				at, taken, account.took, work, account.more, account.less)
		}
		a.mayHave += account.more
		a.have += max(0, math.Round(taken-known)) // without costs with a price
		if taken > s.capacity+tolerance {
			a.failf("rows: of %v %v are taken, and it held %v", at, taken, s.capacity)
		}
	}
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
	_, err = pgx.ForEachRow(rows, []any{&at.name, &at.key, &count, &held}, func() error {
		s := a.catalog.took[at.name]
		if s != nil && s.capacity > 0 {
			a.taken[at] = s.capacity*count/rowsOf(s.Limit) - held // a row that is not there is full
		}
		return nil
	})
	return err
}

func rowsOf(limit ratelimit.Limit) float64 {
	if p, ok := limit.Policy().(ratelimit.TokenBucket); ok {
		return float64(max(1, p.Shards))
	}
	return 1
}

// checkReservations compares the tokens missing in buckets that only reservations take from with the stored reservations, and these
// with the answers to their callers.
func (a *audit) checkReservations(ctx context.Context) error {
	rows, err := a.conn.Query(ctx, `SELECT id::text, state, release, names, keys, costs FROM ratelimit.reservations`)
	if err != nil {
		return err
	}
	charged := map[place]float64{}
	there := map[string]string{}
	var id, state string
	var release bool
	var names, keys []string
	var costs []float64
	_, err = pgx.ForEachRow(rows, []any{&id, &state, &release, &names, &keys, &costs}, func() error {
		there[id] = state
		for i := range names {
			at, cost := place{names[i], keys[i]}, costs[i]
			if state == string(ratelimit.Settled) {
				cost = a.actual(id, at, cost)
			}
			if state != string(ratelimit.Cancelled) && (state != string(ratelimit.Expired) || !release) {
				charged[at] += cost
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for at, taken := range a.taken {
		if a.catalog.took[at.name].ofReservations && math.Abs(taken-charged[at]) > tolerance+arrived(plenty, a.catalog.began) {
			a.failf("reservations: of %v %v are taken, and its reservations cost %v", at, taken, charged[at])
		}
	}
	for id, r := range a.ledger.reservations {
		switch state, ok := there[id]; {
		case !ok && r.acknowledged:
			a.failf("reservations: %s is acknowledged, and is not there", id)
		case r.settled && state != string(ratelimit.Settled):
			a.failf("reservations: %s is acknowledged to be settled, and is %s", id, state)
		case r.cancelled && !r.renewed && state != string(ratelimit.Cancelled):
			a.failf("reservations: %s is acknowledged to be cancelled, and is %s", id, state)
		}
	}
	return nil
}

// actual returns what a settled reservation cost.
func (a *audit) actual(id string, at place, estimate float64) float64 {
	if r := a.ledger.reservations[id]; r != nil {
		for _, of := range r.actual {
			if of.name == at.name && of.key == at.key {
				return of.tokens
			}
		}
	}
	return estimate
}

// checkPairs looks for halves of calls over two limits.
func (a *audit) checkPairs(context.Context) error {
	for at, taken := range a.taken {
		if at.name == "pairA" && math.Abs(taken-a.taken[place{"pairB", at.key}]) > tolerance+arrived(plenty, a.catalog.began) {
			a.failf("pairs: of %v %v are taken, and of the limit that is always taken with it %v", at, taken, a.taken[place{"pairB", at.key}])
		}
	}
	return nil
}

// checkSpans looks, for each bucket, at every span of time.
func (a *audit) checkSpans(context.Context) error {
	for at, account := range a.ledger.accounts {
		s := a.catalog.took[at.name]
		if s.bound == nil || s.ofReservations {
			continue
		}
		items := slices.Concat(account.admitted, a.work[at])
		if len(items) == 0 {
			continue
		}
		worst, spans := worstSpan(items, s.bound)
		a.spans += spans
		if worst.by > tolerance+arrived(s.capacity, a.catalog.began) {
			a.failf("spans: of %v, which gives %s, was admitted %v", at, s.bound.words, worst)
		}
	}
	return nil
}

// checkSlots looks whether more slots were held at once than there are.
func (a *audit) checkSlots(context.Context) error {
	for at, account := range a.ledger.accounts {
		type change struct {
			instant int64
			slots   float64
		}
		var changes []change
		for _, of := range account.held {
			changes = append(changes, change{of.lo, of.tokens}, change{of.hi, -of.tokens})
		}
		slices.SortFunc(changes, func(a, b change) int {
			return cmp.Or(cmp.Compare(a.instant, b.instant), cmp.Compare(a.slots, b.slots))
		})
		held := 0.0
		for _, c := range changes {
			if held += c.slots; held > mostSlots {
				a.failf("slots: of %v %v are held at %d, and it has %d", at, held, c.instant, mostSlots)
				break
			}
		}
	}
	return nil
}
