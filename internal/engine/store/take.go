package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/pgerr"
)

// EndTimeout bounds what ends a transaction, or undoes half a call in it. It does not run on the caller's context: a
// caller who hangs up would turn a commit into one of unknown outcome.
const EndTimeout = 5 * time.Second

// decideByStatement has a statement decide on c. It sets another way if that leaves c undecided.
func (s *Session) decideByStatement(ctx context.Context, c *Call) error {
	err := s.takeByStatement(ctx, c)
	if err != nil && s.mode == alone { // else no function literal is allocated
		err = s.owner.Retry(ctx, c.Verb, err, func() error { return s.takeByStatement(ctx, c) })
	}
	return err
}

// takeByStatement takes the costs of c from all of its buckets, or from none, by one statement: in the transaction of
// the session, or in one of its own. If the statement cannot decide on the rows that it found, nothing was taken, and c
// is decided in another way.
func (s *Session) takeByStatement(ctx context.Context, c *Call) (err error) {
	c.way = byStatement // after an attempt before
	if c.verdict, err = s.take(ctx, c); err == nil && c.verdict == undecided {
		c.way = inGeneral
	}
	return err
}

// take sends the statement for one row or for several.
func (s *Session) take(ctx context.Context, c *Call) (v verdict, err error) {
	asks := c.Asks
	switch {
	case c.traits.Statement == bucket.SlotStatement:
		c.Answers, v, err = s.acquireOne(ctx, asks, c.one[:0])
	case len(asks) == 1:
		c.Answers, v, err = s.takeOne(ctx, asks, c.traits.Statement, c.one[:0])
	case s.mode == alone:
		c.Answers, v, err = s.decideAlone(ctx, asks)
	default:
		c.Answers, v, err = s.decideRows(ctx, asks)
	}
	return v, err
}

// takeOne takes from one bucket on one row, by take_1 or slide_1. The answer is put into room if that has the capacity.
func (u *Unit) takeOne(ctx context.Context, asks []bucket.Ask, kind bucket.Statement,
	room []bucket.Answer,
) (answers []bucket.Answer, v verdict, err error) {
	u.enterQueue(ctx, asks)
	statement, parameters := u.statementFor(&asks[0], kind)
	rows, err := u.conn.Query(ctx, statement, parameters...)
	if err != nil {
		return nil, undecided, err
	}
	a, v, err := scanOne(rows, kind)
	return append(room[:0], a), v, err
}

// statementFor returns the call of take_1 or slide_1 for one row, with its parameters.
func (u *Unit) statementFor(a *bucket.Ask, kind bucket.Statement) (statement string, parameters []any) {
	t := &a.Terms
	since, until := spanOf(t)
	isAlone := u.mode == alone
	if kind == bucket.WindowStatement {
		return u.statements.slide, []any{
			a.Key.Name, a.Key.Key, a.Key.Shard, a.Cost, t.Capacity, int32(t.Steps), t.Step, t.Phase, a.MinBalance,
			since, until, u.AsOf(), isAlone, isAlone && u.relaxed,
		}
	}
	return u.statements.take, []any{
		a.Key.Name, a.Key.Key, a.Key.Shard, a.Cost, t.Capacity, t.Rate, t.Steps, t.Step, t.Phase, a.MinBalance,
		since, until, u.AsOf(), isAlone, isAlone && u.relaxed,
	}
}

// scanOne reads the answer of take_1 or slide_1.
func scanOne(rows pgx.Rows, kind bucket.Statement) (a bucket.Answer, v verdict, err error) {
	defer rows.Close()
	if !rows.Next() {
		return a, undecided, cmp.Or(rows.Err(), errNoAnswer)
	}
	var r struct { // one allocation
		allowed         pgtype.Bool
		value, capacity pgtype.Float8
		ts              pgtype.Int8
		now             int64
		taken           []float64
	}
	columns := []any{&r.allowed, &r.value, &r.ts, &r.capacity, &r.now, &r.taken}
	if kind != bucket.WindowStatement {
		columns = columns[:5]
	}
	if err := rows.Scan(columns...); err != nil {
		return a, undecided, err
	}
	rows.Close() // or there is no Err yet
	a = bucket.Answer{
		Allowed: r.allowed.Bool, Absent: !r.ts.Valid, Now: r.now,
		State: bucket.State{Value: r.value.Float64, TS: r.ts.Int64, Capacity: r.capacity.Float64},
	}
	if r.taken != nil {
		a.State.Parts = &bucket.Parts{Taken: r.taken}
	}
	switch {
	case !r.allowed.Valid:
		v = undecided
	case a.Allowed:
		v = allowed
	default:
		v = refused
	}
	return a, v, rows.Err()
}

// decideRows has decide_1 take from one row of each bucket, all or nothing.
func (u *Unit) decideRows(ctx context.Context, rows []bucket.Ask) (answers []bucket.Answer, v verdict, err error) {
	u.enterQueue(ctx, rows)
	c := columnsOf(rows)
	found, err := u.conn.Query(ctx, u.statements.decide, c.names, c.keys, c.shards, c.costs, c.capacities, c.rates,
		c.steps, c.stepUs, c.phases,
		c.lowest, c.since, c.until, u.AsOf())
	if err != nil {
		return nil, undecided, err
	}
	answers = make([]bucket.Answer, 0, len(rows))
	var a bucket.Answer
	columns := []any{&a.Allowed, &a.State.Value, &a.State.TS, &a.State.Capacity, &a.Now}
	_, err = pgx.ForEachRow(found, columns, func() error {
		answers = append(answers, a)
		return nil
	})
	switch {
	case err != nil || len(answers) == 0:
		return nil, undecided, err
	case bucket.AllAllowed(answers):
		return answers, allowed, nil
	}
	return answers, refused, nil
}

func (u *Unit) groupParameters(rows []bucket.Ask, groups array[integer]) []any {
	c := columnsOf(rows)
	return []any{
		groups, c.names, c.keys, c.shards, c.costs, c.capacities, c.rates, c.steps, c.stepUs, c.phases, c.lowest, c.since,
		c.until, u.AsOf(), u.relaxed,
	}
}

// groupAnswer is the answer of decide_groups_1 for a row: whether the costs of its group were taken. If not, Allowed is
// whether the row has enough, if that is known.
type groupAnswer struct {
	given, known bool
	bucket.Answer
}

// scanGroups reads the answers of decide_groups_1.
func scanGroups(found pgx.Rows, rows []bucket.Ask) ([]groupAnswer, error) {
	answers := make([]groupAnswer, len(rows))
	var is struct { // one allocation
		place, now      int64
		given           bool
		enough          pgtype.Bool
		value, capacity pgtype.Float8
		ts              pgtype.Int8
	}
	answered := 0 // which the tag of another driver doesn't say
	_, err := pgx.ForEachRow(found, []any{&is.place, &is.given, &is.enough, &is.value, &is.ts, &is.capacity, &is.now},
		func() error {
			if is.place < 1 || is.place > int64(len(rows)) {
				return errUnasked
			}
			answered++
			r := &answers[is.place-1]
			r.given, r.known, r.Allowed, r.Absent, r.Now = is.given, is.enough.Valid, is.enough.Bool, !is.ts.Valid, is.now
			if r.State = (bucket.State{Value: is.value.Float64, TS: is.ts.Int64, Capacity: is.capacity.Float64}); r.Absent {
				r.State = rows[is.place-1].Terms.Full(is.now)
			}
			return nil
		})
	if err == nil && answered != len(rows) {
		err = fmt.Errorf("the function answered for %d of %d rows", answered, len(rows))
	}
	return answers, err
}

// decideAlone is decideRows in a statement that is its own transaction. It's undecided if another transaction is in the
// way.
func (u *Unit) decideAlone(ctx context.Context, rows []bucket.Ask) (answers []bucket.Answer, v verdict, err error) {
	found, err := u.conn.Query(ctx, u.statements.decideGroups, u.groupParameters(rows, make(array[integer], len(rows)))...)
	if err != nil {
		return nil, undecided, err
	}
	decided, err := scanGroups(found, rows)
	switch {
	// which the server also says of a lock_timeout, if it ends as the lock is there
	case wasOvertaken(err) || hasTimedOut(err):
		return nil, undecided, nil
	case err != nil:
		return nil, undecided, err
	}
	v, answers = undecided, make([]bucket.Answer, 0, len(rows))
	for _, r := range decided {
		r.Absent = false
		answers = append(answers, r.Answer)
		switch {
		case r.given:
			v = allowed
		case !r.known:
			return nil, undecided, nil
		case !r.Allowed:
			v = refused
		}
	}
	return answers, v, nil
}

// wasOvertaken reports whether a statement for several rows took nothing because another transaction holds one, or was
// quicker.
func wasOvertaken(err error) bool {
	return IsLockTimeout(err) || IsRetryable(err) || pgerr.Code(err) == codeUniqueViolation
}

var errNoAnswer = errors.New("the function returned no row")

// skip reads the results of n statements that answer nothing.
func skip(results pgx.BatchResults, n int) error {
	for range n {
		if _, err := results.Exec(); err != nil {
			return err
		}
	}
	return nil
}

// AsOf returns the instant that replaces the database's clock, as a parameter.
func (s *Store) AsOf() *int64 {
	if s.asOf == nil {
		return nil
	}
	return s.asOf()
}

// Ledgers is an Engine in memory: no server can decide on its rows, so Go does, on a bucket.Ledger.
//
// An error of Lock fails the transaction, as the error of a statement does.
type Ledgers interface {
	Engine
	// Lock locks the rows of a ledger to the end of the transaction, in their order, and puts their states. With mark, it
	// first marks the place that Undo goes back to.
	Lock(ctx context.Context, u *Unit, p *bucket.Ledger, mark bool) error
	// ChangeFree puts the rows of a ledger, has change change it, and saves that, without a transaction. It does nothing
	// if one holds a row.
	ChangeFree(u *Unit, p *bucket.Ledger, change func()) (done bool)
	// Save writes the changed rows of a ledger, and new records.
	Save(ctx context.Context, u *Unit, p *bucket.Ledger, made ...Record) error
	// Undo goes back to the mark of Lock.
	Undo(ctx context.Context, u *Unit) error
}

// decideInMemory decides on c: at once if no transaction holds one of its rows, and else in a transaction. A refusal
// waits for no row.
func (s *Session) decideInMemory(ctx context.Context, c *Call) error {
	switch {
	case s.mode != alone:
		return s.takeLocked(ctx, c)
	case c.Reserve == nil && ctx.Err() == nil && s.takeFree(ctx, c):
		return nil
	case c.Reserve == nil:
		if refused, err := s.lookAndRefuse(ctx, c); refused || err != nil {
			return err
		}
	}
	return s.RetryTx(ctx, c.Verb, func(tx *Session) error { return tx.Decide(ctx, c) })
}

// takeFree decides on c without a transaction, if none holds one of its rows.
func (s *Session) takeFree(ctx context.Context, c *Call) (done bool) {
	p := bucket.NewLedger(c.Asks)
	var mended []bucket.Key
	done = s.memory.ChangeFree(&s.Unit, p, func() {
		mended = p.FromFuture()
		p.SetNow(c.Asks)
		p.Settle(c.Asks)
		if c.Claim() {
			c.Answers = p.Take(c.Asks, c.one[:0])
		}
	})
	for _, row := range mended {
		s.owner.ClockRepaired(ctx, row.Name)
	}
	return done
}

// lookAndRefuse refuses c if a look is enough for that.
func (s *Session) lookAndRefuse(ctx context.Context, c *Call) (refused bool, err error) {
	c.Answers, err = s.Look(ctx, c.Asks, c.one[:0])
	return err == nil && c.isRefused(), err
}

// lock locks and reads the rows of asks, in the transaction of s.
func (s *Session) lock(ctx context.Context, mark bool, asks []bucket.Ask) (*bucket.Ledger, error) {
	p := bucket.NewLedger(asks)
	s.enterQueue(ctx, p.Rows)
	if err := s.memory.Lock(ctx, &s.Unit, p, mark); err != nil {
		return nil, err
	}
	for _, row := range p.FromFuture() { // a decision on them brings them back to the present
		s.owner.ClockRepaired(ctx, row.Name)
	}
	p.SetNow(asks)
	p.Settle(asks)
	return p, nil
}

// takeLocked decides on a call by locking all of its rows, in the transaction of s. A refusal undoes that, unless it
// must correct a clock.
func (s *Session) takeLocked(ctx context.Context, c *Call) error {
	p, err := s.lock(ctx, true, c.Asks)
	if err != nil {
		return err
	}
	if !c.Claim() { // its caller has left
		return s.memory.Undo(ctx, &s.Unit)
	}
	c.Answers = p.Take(c.Asks, c.one[:0])
	var made []Record
	if c.Reserve != nil && bucket.AllAllowed(c.Answers) {
		c.Record = c.Reserve.Record(c.Asks, c.Answers)
		made = append(made, c.Record)
	}
	if p.HasChanged() || made != nil {
		return s.memory.Save(ctx, &s.Unit, p, made...)
	}
	return s.memory.Undo(ctx, &s.Unit)
}

// changeRows changes the rows of asks, once, on rows that it locks: in the transaction of the session, or else in one
// of its own.
func (s *Session) changeRows(ctx context.Context, asks []bucket.Ask, change func(p *bucket.Ledger)) error {
	return s.ensureTx(ctx, func(tx *Session) error {
		p, err := tx.lock(ctx, false, asks)
		if err != nil {
			return err
		}
		change(p)
		return tx.memory.Save(ctx, &tx.Unit, p)
	})
}
