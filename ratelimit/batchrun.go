package ratelimit

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// alone answers c by itself, and waits for the rows that somebody holds.
func (l *Limiter) alone(ctx context.Context, c *call) error {
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	return l.retryHeld(ctx, func(l *Limiter) error { return l.once(ctx, c) })
}

// runAlone answers c by itself, unless it asks for several buckets and somebody holds the row of one.
func (l *Limiter) runAlone(ctx context.Context, c *call) ([]blocked, error) {
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	err := l.blame(ctx, l.once(ctx, c))
	var held *heldError
	if errors.As(err, &held) {
		return []blocked{c.blockedBy(held.row)}, nil
	}
	return nil, err
}

// blockedBy returns c as a call that waits for row.
func (c *call) blockedBy(row bucket.Key) blocked {
	c.waits++
	for i := range c.plan.buckets {
		if b := &c.plan.buckets[i]; b.limit.name == row.Name && b.key == row.Key {
			return blocked{Call: &c.Call, Row: row, OfSeveral: b.sharded()}
		}
	}
	return blocked{Call: &c.Call, Row: row}
}

// once makes one attempt to answer c by itself. It returns a heldError when c asks for several rows and somebody
// holds one of them. For a single row it waits, as it holds none meanwhile.
func (l *Limiter) once(ctx context.Context, c *call) error {
	switch {
	case l.waitFor != nil, c.reserve && len(c.plan.buckets) > 1, !decidesInSQL && l.pool != nil && !c.look:
		return l.togetherOnce(ctx, c.verb, func(tx *Limiter) error {
			waiting, err := tx.decideLocked(ctx, []*call{c})
			if err == nil && len(waiting) > 0 {
				err = &heldError{waiting[0].Row}
			}
			return err
		})
	case c.reserve:
		return l.togetherOnce(ctx, c.verb, func(tx *Limiter) (err error) {
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

// runBatch answers calls in one or two round trips of their own, and in a few more those it then knows to be at the
// edge of a limit. It returns the calls that wait for a row that somebody holds, all others are answered: with an
// error when the statement for it failed.
//
// Where each of the calls for a bucket asks for it alone, all they cost is taken at once; if that is there,
// they all are allowed. The rest is decided one call after the other, on rows that are locked, once a look
// without locks has not refused it.
//
// A batch for one bucket waits for its row. Otherwise nothing waits for a row while the batch keeps other buckets from
// others; but when waitFor is not nil, all calls need that row, and what locks begins with the wait for it.
func (l *Limiter) runBatch(ctx context.Context, calls []*call, waitFor *bucket.Key) (waiting []blocked) {
	if waitFor == nil && askForOne(calls) && !calls[0].plan.sharded() {
		row := calls[0].plan.buckets[0].bucketKey()
		waitFor = &row
	}
	return l.runPart(ctx, calls, waitFor)
}

// runPart is runBatch for some of the calls of a batch.
func (l *Limiter) runPart(ctx context.Context, calls []*call, waitFor *bucket.Key) (waiting []blocked) {
	groups, others := groupByKey(calls)
	if !decidesInSQL || waitFor != nil && (len(groups) != 1 || len(others) > 0) {
		groups, others = nil, calls
	}
	looked := make([][]answer, len(others))
	began := l.watch()
	again := func(calls []*call) []blocked { return l.runPart(ctx, calls, waitFor) }
	failed, err := l.ask(ctx, calls[0].verb, groups, others, looked, waitFor)
	switch {
	case err != nil && failed == nil:
		return runHalves(calls, err, waitFor, again)
	case err != nil:
		waiting = runHalves(failed, err, waitFor, again)
	}
	l.tell(ctx, Batched{Calls: len(calls), Elapsed: l.since(began)})
	open := judge(others, looked)
	for _, at := range groups {
		if at.isHeld() {
			for _, c := range at.calls {
				waiting = append(waiting, c.blockedBy(at.bucket.rowKey()))
			}
			continue
		}
		open = append(open, at.answerCalls()...)
	}
	if len(open) > 0 {
		slices.SortFunc(open, bySeq)
		waiting = append(waiting, l.decideHeld(ctx, open, waitFor)...)
	}
	return waiting
}

// runHalves answers calls whose statement failed with err: with that error, or again in two halves when one of them
// may be to blame for it, and not what they all ask for. Where the statement had waited too long for a row that is being
// made, those for one bucket go on to wait for it by themselves.
func runHalves(calls []*call, err error, waitFor *bucket.Key, runBatch func(calls []*call) []blocked) []blocked {
	one := askForOne(calls)
	switch {
	case waitFor == nil && one && isBound(err):
		return waitForRow(calls, calls[0].plan.buckets[0].bucketKey(), runBatch)
	case waitFor != nil && !isBound(err), one, len(calls) == 1, !isOfOne(err):
		for _, c := range calls {
			c.Answer(err)
		}
		return nil
	}
	half := len(calls) / 2
	return append(runBatch(calls[:half]), runBatch(calls[half:])...)
}

// waitForRow returns the calls as those that wait for a row, and answers those that only look.
func waitForRow(calls []*call, row bucket.Key, runBatch func(calls []*call) []blocked) (waiting []blocked) {
	for _, c := range calls {
		if c.look {
			waiting = append(waiting, runBatch([]*call{c})...)
		} else {
			waiting = append(waiting, c.blockedBy(row))
		}
	}
	return waiting
}

// askForOne reports whether the calls ask for the same bucket and for no other.
func askForOne(calls []*call) bool {
	first := calls[0].plan.buckets[0].bucketKey()
	return !slices.ContainsFunc(calls, func(c *call) bool {
		return len(c.plan.buckets) > 1 || c.plan.buckets[0].bucketKey() != first
	})
}

// isOfOne reports whether a statement for several calls failed for what may be the fault of one of them: a value
// that it was sent, as a key with characters that the database's encoding lacks, or a row that was waited for or changed
// meanwhile. The time that it took is nobody's: it waits for no row for long.
func isOfOne(err error) bool {
	switch code := sqlstate(err); code {
	case codeLockNotAvailable, codeDeadlockDetected, codeSerializationFailure:
		return true
	default:
		return strings.HasPrefix(code, classDataException) || strings.HasPrefix(code, classConstraint)
	}
}

// The classes of SQLSTATE that are about values.
const (
	classDataException = "22"
	classConstraint    = "23"
)

// ask asks for what the groups want and looks at what the others are about, in one round trip; and in some more
// where a row is held of those that a bucket is spread over, as another of them may be free. Where one of these fails,
// what was taken before stays, and failed are the calls that it was for; else, with an error, nothing was taken.
func (l *Limiter) ask(ctx context.Context, verb string, groups []*group, others []*call, looked [][]answer, waitFor *bucket.Key) (failed []*call, err error) {
	if len(groups) == 1 && waitFor != nil {
		return nil, l.standalone(ctx, verb, func() error { return l.spendOne(ctx, groups[0], waitFor) })
	}
	for taken := false; len(groups) > 0 || len(others) > 0; taken = true {
		err := l.standalone(ctx, verb, func() error { return l.spend(ctx, groups, others, looked) })
		if err != nil {
			for _, at := range groups { // what some of them were given was undone with the rest
				at.answer, at.found = answer{}, false
				if taken {
					failed, at.calls = append(failed, at.calls...), nil
				}
			}
			return failed, err
		}
		groups, others = slices.DeleteFunc(slices.Clone(groups), func(at *group) bool { return !at.nextRow() }), nil
	}
	return nil, nil
}

// judge answers the calls for which a look is enough, and returns the others.
func judge(calls []*call, looked [][]answer) (open []*call) {
	held := make(map[bucket.Key]bool) // buckets that are going to be locked
	for i, c := range calls {
		c.answers = looked[i]
		switch {
		case c.look:
			c.Answer(nil)
		case !c.reserve && !c.plan.within(held) && c.plan.hopeless(looked[i]):
			c.answers = c.plan.project(c.answers)
			c.Answer(nil)
		default:
			open = append(open, c)
			for j := range c.plan.buckets {
				held[c.plan.buckets[j].bucketKey()] = true
			}
		}
	}
	return open
}

// within reports whether all buckets of the plan are among those held: then it costs nothing to decide on it in
// its turn, when what those before it take is gone.
func (p *plan) within(held map[bucket.Key]bool) bool {
	return !slices.ContainsFunc(p.buckets, func(b ask) bool { return !held[b.bucketKey()] })
}

// bySeq orders calls by their arrival.
func bySeq(a, b *call) int { return a.seq - b.seq }

// hopeless reports whether a look at the plan's buckets is enough to refuse it. Where a wrong clock has to be
// mended it is not.
func (p *plan) hopeless(answers []answer) bool {
	for i := range p.buckets {
		if len(p.buckets[i].fromFuture(answers[i])) > 0 {
			return false
		}
	}
	return slices.ContainsFunc(p.project(slices.Clone(answers)), func(a answer) bool { return !a.allowed })
}

// decideHeld answers calls one after the other on locked rows, in a transaction of its own. It returns those that
// need a row which somebody holds.
func (l *Limiter) decideHeld(ctx context.Context, calls []*call, waitFor *bucket.Key) (again []blocked) {
	waits := 0
	for _, c := range calls {
		waits = max(waits, c.waits)
	}
	first := l.afterWaitFor(waitFor, waits)
	var waiting []blocked
	err := first.togetherOnce(ctx, calls[0].verb, func(tx *Limiter) (err error) {
		waiting, err = tx.decideLocked(ctx, calls)
		return err
	})
	var held *heldError
	switch {
	case (len(calls) == 1 || askForOne(calls)) && errors.As(first.blame(ctx, err), &held):
		for _, c := range calls {
			again = append(again, c.blockedBy(held.row))
		}
		return again
	case err != nil:
		return runHalves(calls, err, waitFor, func(calls []*call) []blocked { return l.decideHeld(ctx, calls, waitFor) })
	}
	next := 0
	for _, c := range calls {
		if next < len(waiting) && waiting[next].Call == &c.Call {
			next++
			continue
		}
		c.Answer(nil)
	}
	return waiting
}

// decideLocked locks the rows that calls need and are free, and decides on the calls that need no other. It returns
// the others.
func (l *Limiter) decideLocked(ctx context.Context, calls []*call) (waiting []blocked, err error) {
	plans := make([]*plan, len(calls))
	for i, c := range calls {
		plans[i] = c.plan
	}
	h, err := l.lockFree(ctx, &pgx.Batch{}, plans...)
	if err != nil {
		return nil, err
	}
	batch := &pgx.Batch{}
	for _, c := range calls {
		if row, misses := h.missesRow(c.plan); misses {
			waiting = append(waiting, c.blockedBy(row))
			continue
		}
		c.answers = h.take(c.plan)
		if c.reserve {
			c.reservation = l.queueTaken(batch, c.plan, c.answers)
		}
	}
	l.queueSave(batch, h)
	l.queueUnmake(batch, h)
	return waiting, l.db.SendBatch(ctx, batch).Close()
}
