package store

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Run answers calls in one or two round trips of their own, and in a few more those it then knows to be at the
// edge of a limit. It returns the calls that wait for a row that somebody holds. All others are answered, with an
// error where their statement failed.
//
// Where each of the calls for a bucket asks for it alone, all they cost is taken at once; if that is there,
// they all are allowed. The rest is decided one call after the other, on rows that are locked, once a look
// without locks has not refused it.
//
// A batch for one bucket waits for its row. Otherwise nothing waits for a row, but for 2 ms, while the batch keeps other buckets from
// others; but when waitFor is not nil, all calls need that row, and what locks begins with the wait for it.
func (s *Session) Run(ctx context.Context, calls []*Call, waitFor *bucket.Key) (waiting []blocked) {
	if waitFor == nil && askForOne(calls) && !calls[0].isSpread() {
		key := calls[0].Asks[0].Key // a copy: a call that was answered is its caller's again
		waitFor = &key
	}
	seed := s.seed() // calls for one bucket take from the same row
	if waitFor != nil {
		seed = uint64(waitFor.Shard)
	}
	for _, c := range calls {
		s.choose(c)
		c.pickRows(seed)
	}
	return s.runPart(ctx, calls, waitFor, true)
}

// runPart is Run for some of the calls of a batch. Unless together is set, calls over several limits are decided in turn.
func (s *Session) runPart(ctx context.Context, calls []*Call, waitFor *bucket.Key, together bool) (waiting []blocked) {
	groups, others := groupByKey(calls)
	var cs *clusters
	if waitFor != nil && (len(groups) != 1 || len(others) > 0) {
		groups, others = nil, calls
	} else if together && len(others) > 0 {
		cs, others = clustersOf(others)
	}
	began := time.Now()
	again := func(calls []*Call) []blocked { return s.runPart(ctx, calls, waitFor, true) }
	failed, err := s.takeGroupsAndRead(ctx, calls[0].Verb, groups, cs, others, waitFor)
	switch {
	case err != nil && failed == nil && cs != nil && cs.failed && isOfOne(err): // nothing was taken, and one of them may be to blame
		return s.runPart(ctx, calls, waitFor, false)
	case err != nil && failed == nil:
		return runHalves(calls, err, waitFor, again)
	case err != nil:
		waiting = runHalves(failed, err, waitFor, again)
	}
	s.owner.Batched(ctx, len(calls), time.Since(began))
	var short []*Call // calls that a row of several has refused
	isShort := func(c *Call) bool {
		if c.way == byLooking {
			short = append(short, c)
		}
		return c.way == byLooking
	}
	if cs != nil {
		others = append(others, slices.DeleteFunc(cs.answerGiven(), isShort)...)
		slices.SortFunc(others, bySeq)
	}
	open := answerRefused(others)
	for _, g := range groups {
		if g.isHeld() && waitFor == nil { // else it was overtaken while it waited
			for _, c := range g.calls {
				waiting = append(waiting, c.blockedBy(g.row.Key))
			}
			continue
		}
		open = append(open, slices.DeleteFunc(g.answerCalls(), isShort)...)
	}
	if len(short) > 0 {
		waiting = append(waiting, again(short)...)
	}
	if len(open) > 0 {
		slices.SortFunc(open, bySeq)
		waiting = append(waiting, s.decideOpen(ctx, open, waitFor)...)
	}
	return waiting
}

// runHalves runs calls whose statement failed with err again in two halves, when one of them may be to blame for it. It answers the
// calls with err when they all are, as they ask for one bucket, or have waited for one row until a timeout of the session. Where the
// statement had waited too long for a row that is being made, those for one bucket go on to wait for it by themselves.
func runHalves(calls []*Call, err error, waitFor *bucket.Key, runBatch func(calls []*Call) []blocked) []blocked {
	one := askForOne(calls)
	switch {
	case waitFor == nil && one && waitedTooLong(err):
		return waitForRow(calls, calls[0].Asks[0].Key, runBatch)
	case errors.Is(err, ErrOtherMode) && len(calls) > 1: // the others can be decided
	case one, len(calls) == 1, !isOfOne(err), waitFor != nil && HasTimedOut(err) && !waitedTooLong(err):
		for _, c := range calls {
			c.Answer(err)
		}
		return nil
	}
	half := len(calls) / 2
	return append(runBatch(calls[:half]), runBatch(calls[half:])...)
}

// waitForRow returns the calls as those that wait for a row, and answers those that only look.
func waitForRow(calls []*Call, row bucket.Key, runBatch func(calls []*Call) []blocked) (waiting []blocked) {
	for _, c := range calls {
		if c.Look {
			waiting = append(waiting, runBatch([]*Call{c})...)
		} else {
			waiting = append(waiting, c.blockedBy(row))
		}
	}
	return waiting
}

// askForOne reports whether the calls ask for the same bucket and for no other.
func askForOne(calls []*Call) bool {
	first := calls[0].Asks[0].Key
	return !slices.ContainsFunc(calls, func(c *Call) bool { return len(c.Asks) > 1 || c.Asks[0].Key != first })
}

// takeGroupsAndRead takes what the groups and the clusters want and reads what the others are about, in one round trip; in one more
// where groups were asked for boldly and that was not answered for all; and in some more where a row is held of those that a bucket is
// spread over, as another of them may be free. Where one of these fails, what was taken before stays, and failed are the
// calls that it was for; else, with an error, nothing was taken.
func (s *Session) takeGroupsAndRead(ctx context.Context, verb string, groups []*group, cs *clusters, others []*Call, waitFor *bucket.Key) (failed []*Call, err error) {
	if len(groups) == 1 && waitFor != nil {
		g := groups[0]
		return nil, s.retry(ctx, verb, func() error { return s.takeGroup(ctx, g) })
	}
	left, taken, err := s.takeBoldly(ctx, groups, cs, others)
	if err != nil {
		return nil, err
	}
	if groups = left; taken {
		cs, others = nil, nil
	}
	for ; len(groups) > 0 || cs != nil || len(others) > 0; taken = true {
		asked, together, read := groups, cs, others // which the function literal holds by value
		err := s.retry(ctx, verb, func() error { return s.takeGroups(ctx, asked, together, read, s.statements.spend) })
		if err != nil {
			for _, g := range groups { // what some of them were given was undone with the rest
				g.answer, g.found = bucket.Answer{}, false
				if taken {
					failed, g.calls = append(failed, g.calls...), nil
				}
			}
			return failed, err
		}
		groups, others = slices.DeleteFunc(slices.Clone(groups), func(g *group) bool { return !g.nextRow() }), nil
		cs = nil
	}
	return nil, nil
}

// answerRefused answers the calls for which a look is enough, and returns the others.
func answerRefused(calls []*Call) (open []*Call) {
	locked := make(map[bucket.Key]bool) // buckets that are going to be locked
	for _, c := range calls {
		switch {
		case bucket.AnyInOtherMode(c.Asks):
			c.Answer(ErrOtherMode)
		case c.Look:
			c.Answer(nil)
		case c.Reserve == nil && !c.asksAllOf(locked) && c.isRefused():
			c.Answer(nil)
		default:
			open = append(open, c)
			for j := range c.Asks {
				locked[c.Asks[j].Key] = true
			}
		}
	}
	return open
}

// asksAllOf reports whether all buckets of the call are among those locked: then it costs nothing to decide on it in
// its turn, when what those before it take is gone.
func (c *Call) asksAllOf(locked map[bucket.Key]bool) bool {
	return !slices.ContainsFunc(c.Asks, func(a bucket.Ask) bool { return !locked[a.Key] })
}

// isRefused reports whether a look at the call's buckets is enough to refuse it. Where a wrong clock has to be put right
// it is not.
func (c *Call) isRefused() bool {
	for i := range c.Asks {
		if c.Asks[i].FromFuture(c.Answers[i]) {
			return false
		}
	}
	return !bucket.AllAllowed(c.Answers)
}

// bySeq orders calls by their arrival.
func bySeq(a, b *Call) int { return a.seq - b.seq }

// decideOpen answers calls one after the other on locked rows, in a transaction of its own. It returns those that
// need a row which somebody holds.
func (s *Session) decideOpen(ctx context.Context, calls []*Call, waitFor *bucket.Key) (again []blocked) {
	waits := 0
	for _, c := range calls {
		waits = max(waits, c.waits)
	}
	first := s.waitingFor(waitFor, waits)
	var waiting []blocked
	err := first.RetryTx(ctx, calls[0].Verb, func(tx *Session) (err error) {
		waiting, err = tx.decideLocked(ctx, calls)
		return err
	})
	var held *heldError
	switch {
	case (len(calls) == 1 || askForOne(calls)) && errors.As(err, &held):
		for _, c := range calls {
			again = append(again, c.blockedBy(held.row))
		}
		return again
	case err != nil:
		return runHalves(calls, err, waitFor, func(calls []*Call) []blocked { return s.decideOpen(ctx, calls, waitFor) })
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
