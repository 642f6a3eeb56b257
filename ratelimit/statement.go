package ratelimit

import (
	"context"
	_ "embed"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// The statements, as they stand in sql/, for the default schema.
var (
	//go:embed sql/bucket_take.sql
	bucketTakeSQL string
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
	take, takeSeveral, lockSeveral, takeSeveralAlone, read, fill, mend, charge, prune string

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
	now     int64 // microseconds since 1970
}

// run executes the plan once: in the caller's transaction when bound to one, else as its own.
func (l *Limiter) run(ctx context.Context, p *plan) ([]answer, error) {
	if p.free() {
		answers, err := l.read(ctx, p)
		return p.project(answers), err
	}
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

// enter queues for the plan's buckets when the transaction is one of InTx.
func (l *Limiter) enter(ctx context.Context, p *plan) {
	if tx, ok := l.db.(*lentTx); ok {
		tx.places.enter(ctx, p.buckets)
	}
}

// runOne takes from one bucket.
func (l *Limiter) runOne(ctx context.Context, b *bucket) ([]answer, error) {
	t := b.terms
	rows, err := l.db.Query(ctx, l.statements.take, b.limit.name, b.key, int32(0), b.cost, t.capacity, t.rate,
		t.step, t.steps, t.phase, b.lowest, l.asOf(), t.tolerance())
	if err != nil {
		return nil, err
	}
	return scan(rows)
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

// mend repairs buckets that refused and whose ts a wrong clock left in the future: a refusal writes
// nothing, so without this they would refuse until the clock arrives there.
func (l *Limiter) mend(ctx context.Context, p *plan, answers []answer) error {
	for i, a := range answers {
		b := &p.buckets[i]
		if !b.terms.ahead(a.state, a.now) {
			continue
		}
		_, err := l.db.Exec(ctx, l.statements.mend, []string{b.limit.name}, []string{b.key}, []int32{0},
			[]int64{b.terms.step}, []int64{b.terms.phase}, []int64{b.terms.tolerance()}, l.asOf())
		if err != nil {
			return fmt.Errorf("mend ts: %w", err)
		}
	}
	return nil
}

// read reads the plan's buckets; a bucket without a row reads as full.
func (l *Limiter) read(ctx context.Context, p *plan) ([]answer, error) {
	c := p.columns()
	rows, err := l.db.Query(ctx, l.statements.read, c.names, c.keys, c.shards, l.asOf())
	if err != nil {
		return nil, err
	}
	i := 0
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (a answer, err error) {
		var value *float64
		var ts *int64
		if err := row.Scan(&value, &ts, &a.now); err != nil {
			return a, err
		}
		a.state = p.buckets[i].terms.full(a.now)
		if value != nil && ts != nil {
			a.state = state{value: *value, ts: *ts}
		}
		i++
		return a, nil
	})
}

// project decides on states that were only read.
func (p *plan) project(answers []answer) []answer {
	for i, a := range answers {
		b := &p.buckets[i]
		_, answers[i].allowed = b.terms.take(b.terms.mend(a.state, a.now), a.now, b.cost, b.lowest)
	}
	return answers
}

// fill sets the plan's buckets to their capacity.
func (l *Limiter) fill(ctx context.Context, p *plan) error {
	l.enter(ctx, p)
	c := p.columns()
	_, err := l.db.Exec(ctx, l.statements.fill, c.names, c.keys, c.shards, c.capacities, c.steps, c.phases, l.asOf(), c.tolerances)
	return err
}

// columns are the plan's buckets as the array parameters of a statement.
type columns struct {
	names, keys                                 []string
	shards                                      []int32
	costs, capacities, rates, perPeriod, lowest []float64
	steps, phases, tolerances                   []int64
}

func (p *plan) columns() columns {
	var c columns
	for i := range p.buckets {
		b := &p.buckets[i]
		c.names, c.keys, c.shards = append(c.names, b.limit.name), append(c.keys, b.key), append(c.shards, 0)
		c.costs, c.lowest = append(c.costs, b.cost), append(c.lowest, b.lowest)
		c.capacities, c.rates = append(c.capacities, b.terms.capacity), append(c.rates, b.terms.rate)
		c.steps, c.perPeriod = append(c.steps, b.terms.step), append(c.perPeriod, b.terms.steps)
		c.phases, c.tolerances = append(c.phases, b.terms.phase), append(c.tolerances, b.terms.tolerance())
	}
	return c
}

// columns returns the parameters of buckets_take.sql and buckets_take_alone.sql.
func (l *Limiter) columns(p *plan) []any {
	c := p.columns()
	return []any{c.names, c.keys, c.shards, c.costs, c.capacities, c.rates, c.steps, c.perPeriod, c.phases, c.lowest, l.asOf(), c.tolerances}
}

// asOf returns the parameter that replaces the database's clock: nil unless a test set one.
func (l *Limiter) asOf() *int64 {
	if l.config.AsOf == nil {
		return nil
	}
	now := clampInstant(l.config.AsOf().Truncate(time.Microsecond))
	return &now
}

// sendSecond sends a batch of two statements and returns the answers of the second.
func (l *Limiter) sendSecond(ctx context.Context, batch *pgx.Batch) (answers []answer, err error) {
	results := l.db.SendBatch(ctx, batch)
	defer func() {
		if closeErr := results.Close(); err == nil {
			err = closeErr
		}
	}()
	if _, err := results.Exec(); err != nil {
		return nil, err
	}
	rows, err := results.Query()
	if err != nil {
		return nil, err
	}
	return scan(rows)
}

// scan returns one answer for each row: allowed, value, ts, now.
func scan(rows pgx.Rows) ([]answer, error) {
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (a answer, err error) {
		err = row.Scan(&a.allowed, &a.state.value, &a.state.ts, &a.now)
		return a, err
	})
}
