package ratelimit

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// classDataException begins the SQLSTATEs of values that cannot be used.
const classDataException = "22"

// alone answers c by itself.
func (l *Limiter) alone(ctx context.Context, c *call) error {
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	switch {
	case c.reserve:
		return l.together(ctx, c.verb, func(tx *Limiter) (err error) {
			c.reservation, err = tx.reserve(ctx, c.plan)
			return err
		})
	case c.look:
		answers, err := l.read(ctx, c.plan)
		c.answers = answers
		return err
	}
	return l.standalone(ctx, c.verb, func() (err error) {
		c.answers, err = l.run(ctx, c.plan)
		return err
	})
}

// fly answers calls in one or two round trips of their own, and in a few more those it then knows to be at the
// edge of a limit.
//
// Where each of the calls for a bucket asks for it alone, all they cost is taken at once; if that is there,
// they all are allowed. The rest is decided one call after the other, on rows that are locked, once a look
// without locks has not refused it. It answers every call, with an error when the statement for it failed.
func (l *Limiter) fly(ctx context.Context, calls []*call) {
	lineups, others := line(calls)
	looked := make([][]answer, len(others))
	began := l.watch()
	err := l.standalone(ctx, calls[0].verb, func() error { return l.spend(ctx, lineups, others, looked) })
	if isDataError(err) && len(calls) > 1 { // one of them is to blame, and the others are not to suffer for it
		half := len(calls) / 2
		l.fly(ctx, calls[:half])
		l.fly(ctx, calls[half:])
		return
	}
	if err != nil {
		for _, c := range calls {
			c.finish(err)
		}
		return
	}
	l.tell(ctx, Batched{Calls: len(calls), Elapsed: l.since(began)})
	open := judge(others, looked)
	for _, at := range lineups {
		open = append(open, at.finish()...)
	}
	if len(open) > 0 {
		slices.SortFunc(open, bySeat)
		l.decideHeld(ctx, open)
	}
}

// judge answers the calls for which a look is enough, and returns the others.
func judge(calls []*call, looked [][]answer) (open []*call) {
	held := make(map[which]bool) // buckets that are going to be locked
	for i, c := range calls {
		c.answers = looked[i]
		switch {
		case c.look:
			c.finish(nil)
		case !c.reserve && !c.plan.within(held) && c.plan.hopeless(looked[i]):
			c.answers = c.plan.project(c.answers)
			c.finish(nil)
		default:
			open = append(open, c)
			for j := range c.plan.buckets {
				held[c.plan.buckets[j].whole()] = true
			}
		}
	}
	return open
}

// within reports whether all buckets of the plan are among those held: then it costs nothing to decide on it in
// its turn, when what those before it take is gone.
func (p *plan) within(held map[which]bool) bool {
	return !slices.ContainsFunc(p.buckets, func(b bucket) bool { return !held[b.whole()] })
}

// bySeat orders calls by their arrival.
func bySeat(a, b *call) int { return a.seat - b.seat }

// isDataError reports whether a statement failed for a value it was sent, as for a key with characters that
// the database's encoding lacks.
func isDataError(err error) bool { return strings.HasPrefix(sqlstate(err), classDataException) }

// spend asks for what the lineups want and looks at what the others are about, in one round trip.
func (l *Limiter) spend(ctx context.Context, lineups []*lineup, others []*call, looked [][]answer) error {
	batch := &pgx.Batch{}
	var groups [][]*lineup
	for rest := lineups; len(rest) > 0; {
		n := 1
		for n < len(rest) && rest[n].bucket.limit.name == rest[0].bucket.limit.name {
			n++
		}
		groups = append(groups, rest[:n])
		l.queueSpend(batch, rest[:n])
		rest = rest[n:]
	}
	var rows []bucket
	for _, c := range others {
		all, _ := c.plan.rows()
		rows = append(rows, all...)
	}
	for _, at := range lineups { // behind what was taken, so that it shows
		if at.whole.parted() {
			all, _ := (&plan{buckets: []bucket{at.whole}}).rows()
			rows = append(rows, all...)
		}
	}
	if len(rows) > 0 {
		c := (&plan{buckets: rows}).columns()
		batch.Queue(l.statements.read, c.names, c.keys, c.shards, l.asOf())
	}
	if batch.Len() == 0 {
		return nil
	}
	return l.receive(ctx, batch, groups, lineups, others, rows, looked)
}

// receive sends the batch of spend and distributes its answers.
func (l *Limiter) receive(ctx context.Context, batch *pgx.Batch, groups [][]*lineup, lineups []*lineup, others []*call, rows []bucket, looked [][]answer) (err error) {
	results := l.db.SendBatch(ctx, batch)
	defer func() {
		if closeErr := results.Close(); err == nil {
			err = closeErr
		}
	}()
	for _, group := range groups {
		if err := receiveSpend(results, group); err != nil {
			return err
		}
	}
	if len(rows) == 0 {
		return nil
	}
	found, err := results.Query()
	if err != nil {
		return err
	}
	answers, err := scanRows(found, rows)
	if err != nil {
		return err
	}
	if len(answers) != len(rows) {
		return fmt.Errorf("the statement answered for %d of %d rows", len(answers), len(rows))
	}
	for i, c := range others {
		looked[i], answers = c.plan.gather(answers)
	}
	for _, at := range lineups {
		if at.whole.parted() {
			n := at.whole.terms.shards
			at.parts, answers = states(answers[:n]), answers[n:]
		}
	}
	return nil
}

// hopeless reports whether a look at the plan's buckets is enough to refuse it. Where a wrong clock has to be
// mended it is not.
func (p *plan) hopeless(answers []answer) bool {
	for i := range p.buckets {
		if len(p.buckets[i].ahead(answers[i])) > 0 {
			return false
		}
	}
	return slices.ContainsFunc(p.project(slices.Clone(answers)), func(a answer) bool { return !a.allowed })
}

// decideHeld answers calls one after the other on locked rows, in a transaction of its own.
func (l *Limiter) decideHeld(ctx context.Context, calls []*call) {
	plans := make([]*plan, len(calls))
	for i, c := range calls {
		plans[i] = c.plan
	}
	err := l.together(ctx, calls[0].verb, func(tx *Limiter) error {
		h, err := tx.hold(ctx, plans...)
		if err != nil {
			return err
		}
		batch := &pgx.Batch{}
		for _, c := range calls {
			c.answers = h.take(c.plan)
			if c.reserve {
				c.reservation = tx.queueTaken(batch, c.plan, c.answers)
			}
		}
		tx.queueSave(batch, h)
		tx.queueUnmake(batch, h)
		return tx.db.SendBatch(ctx, batch).Close()
	})
	for _, c := range calls {
		c.finish(err)
	}
}
