package store

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// savepoint is what a call over several limits in a caller's transaction goes back to when one refuses.
const savepoint = "ratelimit_take"

// EndTimeout bounds what ends a transaction, or undoes half a call in it. It does not run on the caller's context: a
// caller who hangs up would turn a commit into one of unknown outcome.
const EndTimeout = 5 * time.Second

// takeByStatement has a statement take what c costs from all of its buckets, or from none of them, once: in the transaction that the session is
// of, else as its own. Where the statement cannot stand for what it found, nothing was taken, and c is decided in another way.
func (s *Session) takeByStatement(ctx context.Context, c *Call) (err error) {
	engine, next := s.engine(), byLocking
	if c.traits.Sharded || !engine.LeavesOutHeld() {
		next = byLooking
	}
	c.way = byStatement // after an attempt before
	if c.pickRows(s.seed()); c.way != byStatement {
		return nil
	}
	undecided, err := engine.(decider).take(ctx, &s.Unit, c)
	switch {
	case undecided:
		c.way = next
	case err == nil:
		c.fromRows()
	}
	return err
}

// take sends the statement for one row or for several.
func (postgres) take(ctx context.Context, u *Unit, c *Call) (undecided bool, err error) {
	asks := c.takes
	switch {
	case len(asks) == 1 && (u.mode == alone || !c.traits.Sharded): // else a refusal must leave no row locked
		c.Answers, undecided, err = u.takeOne(ctx, asks, c.traits.Window, c.one[:0])
	case u.mode == alone:
		c.Answers, undecided, err = u.takeCluster(ctx, asks)
	default:
		c.Answers, undecided, err = u.takeRows(ctx, asks)
	}
	return undecided, err
}

// isUndecided reports whether the answer of a statement to the ask is no decision: another policy is in effect, another call was quicker, or
// the row of a sliding window is not as its terms leave it.
func isUndecided(a *bucket.Ask, r bucket.Answer) bool {
	return !r.Allowed && (a.Outside(r) || a.IsStale(r) || isOdd(a, r))
}

// anyUndecided reports whether one of the answers is.
func anyUndecided(asks []bucket.Ask, answers []bucket.Answer) bool {
	for i := range answers {
		if isUndecided(&asks[i], answers[i]) {
			return true
		}
	}
	return false
}

// takeOne takes from one bucket on one row. The answer is put into room if that has the capacity.
func (u *Unit) takeOne(ctx context.Context, asks []bucket.Ask, isWindow bool, room []bucket.Answer) (answers []bucket.Answer, undecided bool, err error) {
	if u.queue != nil {
		u.queue.Enter(ctx, asks)
	}
	a := &asks[0]
	statement, parameters, scan := u.statementFor(a, isWindow)
	rows, err := u.conn.Query(ctx, statement, parameters...)
	if err != nil {
		return nil, false, err
	}
	answers, err = scan(rows, room[:0])
	return answers, err == nil && (len(answers) != 1 || isUndecided(a, answers[0])), err
}

// statementFor returns the statement that takes from one row, with its parameters and what reads its answers.
func (u *Unit) statementFor(a *bucket.Ask, isWindow bool) (statement string, parameters []any, scan func(pgx.Rows, []bucket.Answer) ([]bucket.Answer, error)) {
	taking, sliding := u.statements.takeAlone, u.statements.windowTakeAlone
	if u.mode != alone {
		taking, sliding = u.statements.take, u.statements.windowTake
	}
	if isWindow {
		return sliding, u.windowParameters(a), scanWindows
	}
	return taking, u.takeParameters(a), scanAnswers
}

// takeRows takes from one row of each bucket, all or nothing, in a caller's transaction. It does so behind a savepoint: if a row refuses, all is
// undone, and no row stays locked.
func (u *Unit) takeRows(ctx context.Context, rows []bucket.Ask) (answers []bucket.Answer, undecided bool, err error) {
	if u.queue != nil {
		u.queue.Enter(ctx, rows)
	}
	batch := &pgx.Batch{}
	batch.Queue("SAVEPOINT " + savepoint)
	if len(rows) == 1 {
		statement, parameters, _ := u.statementFor(&rows[0], false)
		batch.Queue(statement, parameters...)
	} else {
		batch.Queue(u.statements.takeSeveral, u.takeSeveralParameters(rows)...)
	}
	err = u.send(ctx, batch, func(results pgx.BatchResults) error {
		if err := skip(results, 1); err != nil {
			return err
		}
		found, err := results.Query()
		if err == nil {
			answers, err = scanAnswers(found, nil)
		}
		return err
	})
	if err != nil {
		return nil, false, err
	}
	undecided = len(answers) != len(rows) || anyUndecided(rows, answers)
	if !undecided && bucket.AllAllowed(answers) {
		return answers, false, nil
	}
	if err := (postgres{}).Undo(ctx, u, nil); err != nil {
		return nil, false, err
	}
	for i := range answers {
		if answers[i].Allowed { // what it took is back
			answers[i].State.Value = min(answers[i].State.Value+rows[i].Cost, rows[i].Terms.Capacity)
		}
	}
	return answers, undecided, nil
}

// skip reads the results of n statements that answer nothing.
func skip(results pgx.BatchResults, n int) error {
	for range n {
		if _, err := results.Exec(); err != nil {
			return err
		}
	}
	return nil
}

// fixClocks puts the rows right that refused and that a wrong clock has left in the future: a refusal writes nothing, so
// without this they would refuse until the clock arrives there. The refusal stands. In a caller's transaction the statement does
// not tell what it found of a row among several that had enough: such a row gains nothing until a call that it allows or refuses
// puts it right.
func (s *Session) fixClocks(ctx context.Context, asks []bucket.Ask, answers []bucket.Answer) error {
	var wrong []bucket.Ask
	if bucket.AllAllowed(answers) {
		return nil
	}
	for i := range asks {
		if asks[i].FromFuture(answers[i]) {
			wrong = append(wrong, asks[i])
		}
	}
	if len(wrong) == 0 {
		return nil
	}
	return s.change(ctx, (*bucket.Page).FixClocks, wrong)
}
