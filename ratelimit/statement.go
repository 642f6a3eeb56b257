package ratelimit

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// The statements, as they stand in sql/, for the default schema.
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
	//go:embed sql/buckets_look.sql
	bucketsLookSQL string
	//go:embed sql/buckets_take.sql
	bucketsTakeSQL string
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
	//go:embed sql/reservations_expired.sql
	reservationsExpiredSQL string
	//go:embed sql/reservations_forget.sql
	reservationsForgetSQL string
)

// savepoint is what a call over several limits in a caller's transaction goes back to when one refuses.
const savepoint = "ratelimit_take"

// statements are the SQL texts for one schema.
type statements struct {
	take, takeSeveral, takeAlone, lockSeveral, takeSeveralAlone, spend string

	read, look, hold, save, fill, mend, charge, prune string

	reservationInsert, reservationLock, reservationSave string
	reservationsExpired, reservationsForget             string
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
		takeSeveral:      in(bucketsTakeSQL),
		lockSeveral:      in(bucketsLockSQL),
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
		reservationsForget:  in(reservationsForgetSQL),
	}
}

// answer is what a statement returned for one bucket.
type answer struct {
	allowed bool
	state   state
	now     int64   // microseconds since 1970
	parts   []state // of each row, when the bucket is spread over several; state is their sum then
}

// run executes the plan once: in the caller's transaction when bound to one, else as its own.
func (l *Limiter) run(ctx context.Context, p *plan) ([]answer, error) {
	switch {
	case p.free():
		answers, err := l.read(ctx, p)
		return p.project(answers), err
	case p.parted():
		return l.runParted(ctx, p)
	}
	return l.runRows(ctx, p)
}

// runRows takes from the rows that the plan names.
func (l *Limiter) runRows(ctx context.Context, p *plan) ([]answer, error) {
	l.enter(ctx, p)
	var answers []answer
	var err error
	switch {
	case len(p.buckets) == 1:
		answers, err = l.runOne(ctx, &p.buckets[0])
	case l.pool != nil:
		answers, err = l.runAlone(ctx, p)
	default:
		answers, err = l.runInTx(ctx, p)
	}
	if err != nil {
		return nil, err
	}
	if len(answers) != len(p.buckets) {
		return nil, fmt.Errorf("the statement answered for %d of %d buckets", len(answers), len(p.buckets))
	}
	return answers, l.mend(ctx, p, answers)
}

// runParted takes from buckets of which some are spread over several rows: from one row of each, from another
// one of each, and last from all of them together.
func (l *Limiter) runParted(ctx context.Context, p *plan) ([]answer, error) {
	var rows *plan
	for range 2 {
		if rows = p.scatter(rows); rows == nil {
			break
		}
		answers, err := l.runRows(ctx, rows)
		if err != nil {
			return nil, err
		}
		if !p.short(answers) {
			return l.complete(ctx, p, rows, answers)
		}
	}
	var answers []answer
	err := l.inTx(ctx, "take", func(tx *Limiter) (err error) {
		tx.enter(ctx, p)
		answers, err = tx.takeHeld(ctx, p)
		return err
	})
	return answers, err
}

// inTx runs fn on l when it is bound to a transaction, and else in a transaction of its own.
func (l *Limiter) inTx(ctx context.Context, verb string, fn func(tx *Limiter) error) error {
	if l.pool == nil {
		return fn(l)
	}
	return l.together(ctx, verb, fn)
}

// enter queues for the plan's buckets when the transaction is one of InTx.
func (l *Limiter) enter(ctx context.Context, p *plan) {
	if tx, ok := l.db.(*lentTx); ok {
		tx.places.enter(ctx, p.buckets)
	}
}

// errOvertaken says that another call was quicker between a statement's look and its deed. It is run again.
var errOvertaken = errors.New("overtaken by another call")

// runOne takes from one bucket.
func (l *Limiter) runOne(ctx context.Context, b *bucket) ([]answer, error) {
	statement := l.statements.take
	if l.pool != nil {
		statement = l.statements.takeAlone
	}
	t := b.terms
	rows, err := l.db.Query(ctx, statement, b.limit.name, b.key, b.shard, b.cost, t.capacity, t.rate,
		t.step, t.steps, t.phase, b.lowest, l.asOf(), t.tolerance())
	if err != nil {
		return nil, err
	}
	answers, err := scan(rows)
	if err == nil && (len(answers) == 0 || b.overtaken(answers[0])) {
		err = errOvertaken
	}
	return answers, err
}

// overtaken reports whether the refusal a contradicts the state it comes with, which another call has changed
// since.
func (b *bucket) overtaken(a answer) bool {
	if a.allowed {
		return false
	}
	_, enough := b.terms.take(a.state, a.now, b.cost, b.lowest)
	return enough
}

// runAlone takes from several buckets in two statements that are a transaction of their own, sent
// together.
func (l *Limiter) runAlone(ctx context.Context, p *plan) ([]answer, error) {
	arguments := l.columns(p)
	batch := &pgx.Batch{}
	batch.Queue(l.statements.lockSeveral, arguments...)
	batch.Queue(l.statements.takeSeveralAlone, arguments...)
	return l.sendSecond(ctx, batch)
}

// runInTx takes from several buckets in the caller's transaction. When one refuses, all is undone by going
// back to the savepoint, which also releases the row locks.
func (l *Limiter) runInTx(ctx context.Context, p *plan) ([]answer, error) {
	batch := &pgx.Batch{}
	batch.Queue("SAVEPOINT " + savepoint)
	batch.Queue(l.statements.takeSeveral, l.columns(p)...)
	answers, err := l.sendSecond(ctx, batch)
	if err != nil {
		return nil, err
	}
	refused := false
	for _, a := range answers {
		refused = refused || !a.allowed
	}
	if !refused {
		return answers, nil
	}
	if err := l.undo(ctx); err != nil {
		return nil, err
	}
	for i := range answers {
		if answers[i].allowed { // what it took is back
			answers[i].state.value = min(answers[i].state.value+p.buckets[i].cost, p.buckets[i].terms.capacity)
		}
	}
	return answers, nil
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
	for i, a := range answers {
		b := &p.buckets[i]
		if !b.terms.ahead(a.state, a.now) {
			continue
		}
		_, err := l.db.Exec(ctx, l.statements.mend, []string{b.limit.name}, []string{b.key}, []int32{b.shard},
			[]int64{b.terms.step}, []int64{b.terms.phase}, []int64{b.terms.tolerance()}, l.asOf())
		if err != nil {
			return fmt.Errorf("mend ts: %w", err)
		}
		l.tell(ctx, Mended{Limit: b.limit.name})
	}
	return nil
}

// fill sets the plan's buckets to their capacity.
func (l *Limiter) fill(ctx context.Context, p *plan) error {
	l.enter(ctx, p)
	rows, _ := p.rows()
	c := (&plan{buckets: rows}).columns()
	_, err := l.db.Exec(ctx, l.statements.fill, c.names, c.keys, c.shards, c.capacities, c.steps, c.phases, l.asOf(), c.tolerances)
	return err
}

// asOf returns the parameter that replaces the database's clock: nil unless a test set one.
func (l *Limiter) asOf() *int64 {
	if l.config.AsOf == nil {
		return nil
	}
	now := clampInstant(l.config.AsOf().Truncate(time.Microsecond))
	return &now
}
