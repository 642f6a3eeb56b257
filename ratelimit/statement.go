package ratelimit

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

//go:generate go run ./sql/gen sql

// The statements, as they stand in sql/, for the default schema. They are generated from sql/tmpl/.
var (
	//go:embed sql/bucket_take.sql
	bucketTakeSQL string
	//go:embed sql/bucket_take_alone.sql
	bucketTakeAloneSQL string
	//go:embed sql/buckets_spend.sql
	bucketsSpendSQL string
	//go:embed sql/buckets_hold.sql
	bucketsHoldSQL string
	//go:embed sql/buckets_save.sql
	bucketsSaveSQL string
	//go:embed sql/buckets_unmake.sql
	bucketsUnmakeSQL string
	//go:embed sql/buckets_look.sql
	bucketsLookSQL string
	//go:embed sql/buckets_take.sql
	bucketsTakeSQL string
	//go:embed sql/buckets_busy.sql
	bucketsBusySQL string
	//go:embed sql/wait_bound.sql
	boundWaitSQL string
	//go:embed sql/buckets_lock.sql
	bucketsLockSQL string
	//go:embed sql/buckets_take_alone.sql
	bucketsTakeAloneSQL string
	//go:embed sql/buckets_read.sql
	bucketsReadSQL string
	//go:embed sql/buckets_fill.sql
	bucketsFillSQL string
	//go:embed sql/buckets_mend.sql
	bucketsMendSQL string
	//go:embed sql/buckets_charge.sql
	bucketsChargeSQL string
	//go:embed sql/buckets_prune.sql
	bucketsPruneSQL string
	//go:embed sql/reservation_insert.sql
	reservationInsertSQL string
	//go:embed sql/reservation_lock.sql
	reservationLockSQL string
	//go:embed sql/reservation_save.sql
	reservationSaveSQL string
	//go:embed sql/reservations_lock.sql
	reservationsLockSQL string
	//go:embed sql/reservations_expired.sql
	reservationsExpiredSQL string
	//go:embed sql/reservations_forget.sql
	reservationsForgetSQL string
)

// savepoint is what a call over several limits in a caller's transaction goes back to when one refuses.
const savepoint = "ratelimit_take"

// statements are the SQL texts for one schema.
type statements struct {
	take, takeSeveral, takeAlone, takeSeveralAlone, spend string

	read, look, hold, lock, busy, boundWait, save, unmake, fill, mend, charge, prune string

	reservationInsert, reservationLock, reservationSave string
	reservationsExpired, reservationsLock               string
	reservationsForget                                  string
}

func newStatements(schema string) statements {
	tables := strings.NewReplacer(
		defaultSchema+".buckets", pgx.Identifier{schema, "buckets"}.Sanitize(),
		defaultSchema+".reservations", pgx.Identifier{schema, "reservations"}.Sanitize())
	in := tables.Replace
	return statements{
		take:             in(bucketTakeSQL),
		takeAlone:        in(bucketTakeAloneSQL),
		spend:            in(bucketsSpendSQL),
		look:             in(bucketsLookSQL),
		hold:             in(bucketsHoldSQL),
		save:             in(bucketsSaveSQL),
		unmake:           in(bucketsUnmakeSQL),
		takeSeveral:      in(bucketsTakeSQL),
		lock:             in(bucketsLockSQL),
		busy:             in(bucketsBusySQL),
		boundWait:        boundWaitSQL,
		takeSeveralAlone: in(bucketsTakeAloneSQL),
		read:             in(bucketsReadSQL),
		fill:             in(bucketsFillSQL),
		mend:             in(bucketsMendSQL),
		charge:           in(bucketsChargeSQL),
		prune:            in(bucketsPruneSQL),

		reservationInsert:   in(reservationInsertSQL),
		reservationLock:     in(reservationLockSQL),
		reservationSave:     in(reservationSaveSQL),
		reservationsExpired: in(reservationsExpiredSQL),
		reservationsLock:    in(reservationsLockSQL),
		reservationsForget:  in(reservationsForgetSQL),
	}
}

// answer is what a statement returned for one bucket.
type answer struct {
	allowed bool
	state   bucket.State
	now     int64          // microseconds since 1970
	rows    []bucket.State // of each row, when the bucket is spread over several; state is their sum then
	held    bool           // whether somebody holds the row, so that it was not decided on
}

// run executes the plan once: in the caller's transaction when bound to one, else as its own.
func (l *Limiter) run(ctx context.Context, p *plan) ([]answer, error) {
	switch {
	case p.free():
		answers, err := l.read(ctx, p)
		return p.project(answers), err
	case !decidesInSQL:
		return l.takeHeld(ctx, p)
	case p.sharded():
		return l.runSharded(ctx, p)
	}
	return l.runRows(ctx, p)
}

// runRows takes from the rows that the plan names.
func (l *Limiter) runRows(ctx context.Context, p *plan) ([]answer, error) {
	l.enter(ctx, p)
	var answers []answer
	var err error
	if len(p.buckets) == 1 {
		answers, err = l.runOne(ctx, p)
	} else {
		answers, _, err = l.runAllOrNothing(ctx, p, nil)
	}
	if err != nil {
		return nil, err
	}
	return answers, l.mend(ctx, p, answers)
}

// enter queues for the plan's buckets when the transaction is one of InTx.
func (l *Limiter) enter(ctx context.Context, p *plan) {
	if tx, ok := l.db.(*lentTx); ok && tx.places != nil {
		tx.places.enter(ctx, p.buckets)
	}
}

// errOvertaken says that another call was quicker between a statement's look and its deed. It is run again.
var errOvertaken = errors.New("overtaken by another call")

// runOne takes from one bucket.
func (l *Limiter) runOne(ctx context.Context, p *plan) ([]answer, error) {
	statement := l.statements.take
	if l.pool != nil {
		statement = l.statements.takeAlone
	}
	rows, err := l.db.Query(ctx, statement, l.parameters(&p.buckets[0])...)
	if err != nil {
		return nil, err
	}
	answers, err := scanInto(rows, p.oneAnswer[:0])
	if err == nil {
		err = p.answered(answers)
	}
	return answers, err
}

// answered returns an error when the answers are not those for the plan's buckets, or are out of date, or when
// somebody holds a row.
func (p *plan) answered(answers []answer) error {
	switch {
	case len(p.buckets) == 1 && (len(answers) == 0 || p.buckets[0].overtaken(answers[0])):
		return errOvertaken
	case len(answers) != len(p.buckets):
		return fmt.Errorf("the statement answered for %d of %d buckets", len(answers), len(p.buckets))
	}
	for i := range answers {
		if answers[i].held {
			return &heldError{p.buckets[i].rowKey()}
		}
	}
	return nil
}

// overtaken reports whether the refusal a contradicts the state it comes with, which another call has changed
// since.
func (b *ask) overtaken(a answer) bool {
	if a.allowed {
		return false
	}
	_, enough := b.terms.Take(a.state, a.now, b.cost, b.lowest)
	return enough
}

// runAllOrNothing takes from the plan's buckets, in a caller's transaction behind a savepoint: when one of them
// refuses, all is undone, and no row stays locked. In the same round trip it looks at rows, when there are any.
func (l *Limiter) runAllOrNothing(ctx context.Context, p *plan, look []ask) (answers, found []answer, err error) {
	if l.own && len(p.buckets) > 1 {
		return l.takeOwn(ctx, p, look)
	}
	batch := &pgx.Batch{}
	l.queueTake(batch, p)
	if answers, found, err = l.sendTake(ctx, batch, p, look); err == nil {
		err = p.answered(answers)
	}
	if err != nil || l.pool != nil || allAllowed(answers) {
		return answers, found, err
	}
	if err := l.undo(ctx); err != nil {
		return nil, nil, err
	}
	for i := range answers {
		if answers[i].allowed { // what it took is back
			answers[i].state.Value = min(answers[i].state.Value+p.buckets[i].cost, p.buckets[i].terms.Capacity)
		}
	}
	return answers, found, nil
}

// takeOwn is runAllOrNothing in a transaction of the Limiter's own, which waits for no row while it holds others.
func (l *Limiter) takeOwn(ctx context.Context, p *plan, look []ask) (answers, found []answer, err error) {
	if answers, err = l.takeHeld(ctx, p); err == nil && len(look) > 0 {
		found, err = l.readRows(ctx, l.statements.look, look)
	}
	return answers, found, err
}

// queueTake queues what takes from the plan's buckets: outside a transaction a statement; in a caller's
// transaction one behind a savepoint.
func (l *Limiter) queueTake(batch *pgx.Batch, p *plan) {
	alone, one := l.pool != nil, len(p.buckets) == 1
	switch {
	case alone && one:
		batch.Queue(l.statements.takeAlone, l.parameters(&p.buckets[0])...)
	case alone:
		batch.Queue(l.statements.takeSeveralAlone, l.columns(p)...)
	case one:
		batch.Queue("SAVEPOINT " + savepoint)
		batch.Queue(l.statements.take, l.parameters(&p.buckets[0])...)
	default:
		batch.Queue("SAVEPOINT " + savepoint)
		batch.Queue(l.statements.takeSeveral, l.columns(p)...)
	}
}

// sendTake sends what queueTake has queued, and with it a look at rows when there are any. It returns the answers
// to both.
func (l *Limiter) sendTake(ctx context.Context, batch *pgx.Batch, p *plan, look []ask) (answers, found []answer, err error) {
	unread := batch.Len() - 1
	if len(look) > 0 {
		c := (&plan{buckets: look}).columns()
		batch.Queue(l.statements.look, c.names, c.keys, c.shards, l.asOf())
	}
	results := l.db.SendBatch(ctx, batch)
	defer func() {
		if closeErr := results.Close(); err == nil {
			err = closeErr
		}
	}()
	for range unread {
		if _, err := results.Exec(); err != nil {
			return nil, nil, err
		}
	}
	rows, err := results.Query()
	if err == nil {
		answers, err = scan(rows)
	}
	if err != nil {
		return nil, nil, &boundError{err, p.buckets}
	}
	if len(look) == 0 {
		return answers, nil, err
	}
	if rows, err = results.Query(); err != nil {
		return nil, nil, err
	}
	if found, err = scanRows(rows, look); err == nil && len(found) > 0 { // above READ COMMITTED it looks at none
		err = allRows(found, look)
	}
	return answers, found, err
}

// undo goes back to the savepoint and removes it.
func (l *Limiter) undo(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout) // half a call must not stay
	defer cancel()
	batch := &pgx.Batch{}
	batch.Queue("ROLLBACK TO SAVEPOINT " + savepoint)
	batch.Queue("RELEASE SAVEPOINT " + savepoint)
	if err := l.db.SendBatch(ctx, batch).Close(); err != nil {
		return fmt.Errorf("undo: %w", err)
	}
	return nil
}

// mend repairs rows that refused and whose ts a wrong clock left in the future: a refusal writes
// nothing, so without this they would refuse until the clock arrives there.
func (l *Limiter) mend(ctx context.Context, p *plan, answers []answer) error {
	for i := range p.buckets {
		for _, b := range p.buckets[i].fromFuture(answers[i]) {
			_, err := l.db.Exec(ctx, l.statements.mend, []string{b.limit.name}, []string{b.key}, []int32{b.shard},
				[]int64{b.terms.Step}, []int64{b.terms.Phase}, []int64{b.terms.Tolerance()}, l.asOf(), []float64{b.terms.Capacity})
			if err != nil {
				return fmt.Errorf("mend ts: %w", err)
			}
			l.tell(ctx, Mended{Limit: b.limit.name})
		}
	}
	return nil
}

// fromFuture returns the rows of the bucket that the answer shows to be written by a clock that was wrong.
func (b *ask) fromFuture(a answer) (rows []ask) {
	if !b.sharded() {
		if b.terms.FromFuture(a.state, a.now) {
			rows = append(rows, *b)
		}
		return rows
	}
	for shard, s := range a.rows {
		if row := b.row(int32(shard)); row.terms.FromFuture(s, a.now) {
			rows = append(rows, row)
		}
	}
	return rows
}

// fill sets the plan's buckets to their capacity.
func (l *Limiter) fill(ctx context.Context, p *plan) error {
	if !decidesInSQL {
		return l.inTx(ctx, func(tx *Limiter) error { return tx.fillHeld(ctx, p) })
	}
	rows, _ := p.rows()
	l.enter(ctx, &plan{buckets: rows})
	c := (&plan{buckets: rows}).columns()
	return l.change(ctx, rows, l.statements.fill, c.names, c.keys, c.shards, c.capacities, c.steps, c.phases, l.asOf(), c.tolerances)
}

// asOf returns the parameter that replaces the database's clock: nil unless a test set one.
func (l *Limiter) asOf() *int64 {
	if l.config.AsOf == nil {
		return nil
	}
	now := clampInstant(l.config.AsOf().Truncate(time.Microsecond))
	return &now
}
