package ratelimit

import (
	"context"
	"math/rand/v2"
	"reflect"
	"slices"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// runSharded takes from buckets of which some are spread over several rows: from one row of each, from another
// one of each, and last from all of them together. A try that is refused leaves no row locked: the next one may
// have to be locked before it.
func (l *Limiter) runSharded(ctx context.Context, p *plan) ([]answer, error) {
	all, _ := p.rows()
	lane, looked := l.lane(), false
	for try := range 2 {
		rows := p.scatter(lane, try)
		if rows == nil {
			break
		}
		l.enter(ctx, rows)
		answers, found, err := l.runAllOrNothing(ctx, rows, all)
		if err != nil {
			return nil, err
		}
		looked = len(found) > 0
		taken, certain := allAllowed(answers), looked || p.certain(answers)
		p.complete(rows, answers, found)
		switch {
		case taken:
			return answers, nil
		case certain && !allAllowed(answers):
			return answers, l.mend(ctx, p, answers)
		}
	}
	return l.runHeld(ctx, p, looked)
}

// runHeld takes from all rows of the plan's buckets together. Outside a transaction a look comes first, unless
// there was one, so that a refusal locks and writes nothing.
func (l *Limiter) runHeld(ctx context.Context, p *plan, looked bool) (answers []answer, err error) {
	if l.pool != nil && !looked {
		found, err := l.read(ctx, p)
		if err != nil {
			return nil, err
		}
		if answers = p.project(found); !allAllowed(answers) {
			return answers, l.mend(ctx, p, answers)
		}
	}
	err = l.inTx(ctx, func(tx *Limiter) (err error) {
		answers, err = tx.takeHeld(ctx, p)
		return err
	})
	return answers, err
}

// lane returns a number that scatter chooses rows by: a random one, but the same for all calls of a
// transaction and all attempts of InTx. So a transaction that takes from a bucket twice returns to the row it has
// locked, and does not wait for another that does the same; and one that is made again, to the queue it is in.
func (l *Limiter) lane() uint64 {
	var owner any = l.db
	if tx, ok := l.db.(*lentTx); ok && tx.places != nil {
		owner = tx.places
	}
	if v := reflect.ValueOf(owner); l.pool == nil && v.Kind() == reflect.Pointer {
		return rand.NewPCG(uint64(v.Pointer()), 0).Uint64()
	}
	return rand.Uint64()
}

// scatter returns the plan with one row in place of each bucket that is spread over several: another at the
// second try than at the first. It returns nil when the rows have to be asked together: where one could never
// hold the cost, and at the second try where the cost may be owed.
func (p *plan) scatter(lane uint64, try int) *plan {
	rows := &plan{buckets: slices.Clone(p.buckets)}
	for i := range rows.buckets {
		b := &rows.buckets[i]
		if !b.sharded() {
			continue
		}
		n := uint64(b.terms.Shards)
		shard := lane % n
		if try > 0 {
			shard = (shard + 1 + lane>>32%(n-1)) % n
		}
		row := b.row(int32(shard))
		if row.cost = b.cost; row.cost > row.terms.Capacity || try > 0 && b.lowest < 0 {
			return nil
		}
		*b = row
	}
	return rows
}

// complete turns the answers for one row of each bucket into answers for the buckets, from the look at all of
// the rows. Where nothing was looked at, each row is taken to hold what the one that was asked held before.
func (p *plan) complete(rows *plan, answers, found []answer) {
	taken := allAllowed(answers)
	_, from := p.rows()
	for i := range p.buckets {
		b, a := &p.buckets[i], &answers[i]
		if !b.sharded() {
			continue
		}
		row, states := &rows.buckets[i], make([]bucket.State, b.terms.Shards)
		for j := range states {
			states[j] = a.state
			switch {
			case len(found) > 0:
				states[j] = found[from[i]+j].state
			case taken:
				states[j].Value = min(a.state.Value+row.cost, row.terms.Capacity)
			}
		}
		if a.allowed { // where that was undone, the look still saw it
			states[row.shard] = a.state
		} else if len(found) > 0 {
			a.now = found[from[i]].now
		}
		a.of(b, states)
		a.allowed = a.allowed || a.state.Value-b.cost >= b.lowest
	}
}

// certain reports whether the answers for one row of each bucket say which of the buckets refuse: no row refuses
// whose bucket may hold more in others.
func (p *plan) certain(answers []answer) bool {
	for i, a := range answers {
		if !a.allowed && p.buckets[i].sharded() {
			return false
		}
	}
	return true
}

// allAllowed reports whether no answer is a refusal.
func allAllowed(answers []answer) bool {
	return !slices.ContainsFunc(answers, func(a answer) bool { return !a.allowed })
}
