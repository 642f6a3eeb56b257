package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// savepoint is what a call over several limits in a caller's transaction goes back to when one refuses.
const savepoint = "ratelimit_take"

// EndTimeout bounds what ends a transaction, or undoes half a call in it. It does not run on the caller's context: a
// caller who hangs up would turn a commit into one of unknown outcome.
const EndTimeout = 5 * time.Second

// ErrStale says that another call was quicker between a statement's look and its deed. The statement is run again.
var ErrStale = errors.New("overtaken by another call")

// errOutside says that a statement that decides by itself was given terms which do not hold for a bucket, or do no longer.
// Nothing was taken. The call is decided on locked rows, which are settled then.
var errOutside = errors.New("other terms hold for a bucket")

// Take takes what the asks cost from all of their buckets, or from none of them, once: in the transaction that the
// session is of, else as its own. One of them costs something. The answers are put into room when that has the capacity.
func (s *Session) Take(ctx context.Context, asks []bucket.Ask, room []bucket.Answer) ([]bucket.Answer, error) {
	isOne := len(asks) == 1 && asks[0].Terms.Shards <= 1
	if s.routed() && isRoutedTake(asks) {
		if answers, taken, err := s.takeRouted(ctx, asks, room); err != nil || taken {
			return answers, err
		}
	}
	switch {
	case !s.inSQL() || !bucket.AllSteps(asks) && !isWindow(asks) || bucket.AnyReshaped(asks), s.mode == ownTx && len(asks) > 1 && bucket.AnySharded(asks) && bucket.AnyEras(asks):
		return s.takeByLocking(ctx, asks) // in the last case one row of each would be locked, which may not be settled by itself
	case !isOne && bucket.AnySharded(asks):
		answers, err := s.takeSharded(ctx, asks)
		return s.orByLocking(ctx, asks, answers, err)
	}
	if s.queue != nil {
		s.queue.Enter(ctx, asks)
	}
	var answers []bucket.Answer
	var err error
	if isOne {
		answers, err = s.takeOne(ctx, asks, room)
	} else {
		answers, err = s.takeSeveral(ctx, asks)
	}
	if err != nil || isOne && answers[0].Allowed {
		return s.orByLocking(ctx, asks, answers, err)
	}
	return answers, s.fixClocks(ctx, asks, answers)
}

// orByLocking returns the answers and err, but where the statement was Outside those of a decision on locked rows.
func (s *Session) orByLocking(ctx context.Context, asks []bucket.Ask, answers []bucket.Answer, err error) ([]bucket.Answer, error) {
	if errors.Is(err, errOutside) {
		return s.takeByLocking(ctx, asks)
	}
	return answers, err
}

// TakeOrRead is Take for asks that may cost nothing.
func (s *Session) TakeOrRead(ctx context.Context, asks []bucket.Ask) ([]bucket.Answer, error) {
	if !bucket.AllCostless(asks) {
		return s.Take(ctx, asks, nil)
	}
	return s.Look(ctx, asks, nil)
}

// takeOne takes from one bucket.
func (s *Session) takeOne(ctx context.Context, asks []bucket.Ask, room []bucket.Answer) ([]bucket.Answer, error) {
	if asks[0].Terms.Rule != nil { // the one that there is a statement for
		return s.takeWindow(ctx, asks, room)
	}
	statement := s.statements.take
	if s.mode == alone {
		statement = s.statements.takeAlone
	}
	rows, err := s.conn.Query(ctx, statement, s.takeParameters(&asks[0])...)
	if err != nil {
		return nil, err
	}
	answers, err := scanAnswers(rows, room[:0])
	if err == nil {
		err = checkAnswers(asks, answers)
	}
	return answers, err
}

// takeSeveral takes from several buckets on one row each, all or nothing.
func (s *Session) takeSeveral(ctx context.Context, asks []bucket.Ask) (answers []bucket.Answer, err error) {
	if s.mode == alone {
		var decided bool
		if answers, decided, err = s.takeCluster(ctx, asks); err != nil || decided {
			return answers, err
		}
	}
	answers, _, err = s.takeAllOrNothing(ctx, asks, nil)
	return answers, err
}

// checkAnswers returns an error when the answers are not those to the asks, or are out of date, or when somebody holds a
// row.
func checkAnswers(asks []bucket.Ask, answers []bucket.Answer) error {
	switch {
	case len(asks) == len(answers) && bucket.AnyOutside(asks, answers), len(answers) == 0 && bucket.AnyEras(asks):
		return errOutside
	case len(asks) == 1 && (len(answers) == 0 || !answers[0].Allowed && asks[0].IsStale(answers[0])):
		return ErrStale
	case len(answers) != len(asks):
		return fmt.Errorf("the statement answered for %d of %d buckets", len(answers), len(asks))
	}
	for i := range answers {
		if answers[i].Held {
			return &heldError{asks[i].Key}
		}
	}
	return nil
}

// takeAllOrNothing takes from the buckets, in a caller's transaction behind a savepoint: when one of them refuses, all is
// undone, and no row stays locked. In the same round trip it looks at the rows of look, when there are any.
func (s *Session) takeAllOrNothing(ctx context.Context, asks, look []bucket.Ask) (answers, found []bucket.Answer, err error) {
	if s.mode == ownTx && len(asks) > 1 { // which waits for no row while it holds others
		if answers, err = s.takeLocked(ctx, asks); err == nil && len(look) > 0 {
			found, err = s.readRows(ctx, s.statements.look, look)
		}
		return answers, found, err
	}
	batch := &pgx.Batch{}
	s.queueTake(batch, asks)
	if answers, found, err = s.sendTake(ctx, batch, asks, look); err == nil {
		err = checkAnswers(asks, answers)
	}
	if s.mode != alone && errors.Is(err, errOutside) { // it may have taken from the others
		if undoErr := s.undo(ctx); undoErr != nil {
			err = undoErr
		}
	}
	if err != nil || s.mode == alone || bucket.AllAllowed(answers) {
		return answers, found, err
	}
	if err := s.undo(ctx); err != nil {
		return nil, nil, err
	}
	for i := range answers {
		if answers[i].Allowed { // what it took is back
			answers[i].State.Value = min(answers[i].State.Value+asks[i].Cost, asks[i].Terms.Capacity)
		}
	}
	return answers, found, nil
}

// queueTake queues what takes from the buckets: outside a transaction a statement; in a caller's transaction one behind a
// savepoint.
func (s *Session) queueTake(batch *pgx.Batch, asks []bucket.Ask) {
	one, several := s.statements.takeAlone, s.statements.takeSeveralAlone
	if s.mode != alone {
		batch.Queue("SAVEPOINT " + savepoint)
		one, several = s.statements.take, s.statements.takeSeveral
	}
	if len(asks) == 1 {
		batch.Queue(one, s.takeParameters(&asks[0])...)
	} else {
		batch.Queue(several, s.takeSeveralParameters(asks)...)
	}
}

// sendTake sends what queueTake has queued, and with it a look at rows when there are any. It returns the answers
// to both.
func (s *Session) sendTake(ctx context.Context, batch *pgx.Batch, asks, look []bucket.Ask) (answers, found []bucket.Answer, err error) {
	unread := batch.Len() - 1
	if len(look) > 0 {
		s.queueRead(batch, s.statements.look, look)
	}
	err = s.send(ctx, batch, func(results pgx.BatchResults) error {
		if err := skip(results, unread); err != nil {
			return err
		}
		rows, err := results.Query()
		if err == nil {
			answers, err = scanAnswers(rows, nil)
		}
		if err != nil {
			return &shortWaitError{err, asks, nil}
		}
		if len(look) == 0 {
			return nil
		}
		if rows, err = results.Query(); err != nil {
			return err
		}
		if found, err = scanRows(rows, look); err == nil && len(found) > 0 { // above READ COMMITTED it looks at none
			err = answeredAll(found, look)
		}
		return err
	})
	return answers, found, err
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

// undo goes back to the savepoint and removes it.
func (s *Session) undo(ctx context.Context) error {
	if s.engine != nil {
		return s.engine.Undo()
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), EndTimeout) // half a call must not stay
	defer cancel()
	batch := &pgx.Batch{}
	batch.Queue("ROLLBACK TO SAVEPOINT " + savepoint)
	batch.Queue("RELEASE SAVEPOINT " + savepoint)
	if err := s.conn.SendBatch(ctx, batch).Close(); err != nil {
		return fmt.Errorf("undo: %w", err)
	}
	return nil
}

// OrSpoil returns err, with which a call in the caller's transaction ended. When the context has ended between two
// statements of the call, it makes the transaction one that can only be rolled back: half of the call may be done, and
// the connection is alive. A context that ends during a statement closes the connection, which comes to the same.
func (s *Session) OrSpoil(ctx context.Context, err error) error {
	if err == nil || ctx.Err() == nil || errors.Is(err, ErrNotReserved) {
		return err
	}
	return s.Spoil(ctx, err)
}

// Spoil returns err, and makes the caller's transaction one that can only be rolled back.
func (s *Session) Spoil(ctx context.Context, err error) error {
	if s.engine != nil {
		s.engine.Spoil()
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), EndTimeout)
	defer cancel()
	_, _ = s.conn.Exec(ctx, "ROLLBACK TO SAVEPOINT "+savepoint+"_cancelled") // there is none
	return err
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
		wrong = append(wrong, asks[i].RowsFromFuture(answers[i])...)
	}
	if len(wrong) == 0 {
		return nil
	}
	return s.ensureTx(ctx, func(tx *Session) error {
		p, err := tx.lock(ctx, &pgx.Batch{}, wrong)
		if err != nil {
			return err
		}
		p.FixClocks()
		return tx.save(ctx, p)
	})
}
