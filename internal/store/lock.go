package store

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// lockedRows are rows that a transaction has locked and read, to be decided on by package bucket. Deciding on them takes
// one round trip more than the statements that decide by themselves. It can do what these cannot: decide on many calls one
// after the other, and on a bucket spread over several rows as a whole.
type lockedRows struct {
	rows    []bucket.Ask // in the order of locking
	states  []bucket.State
	now     int64
	made    []bool // which of them were not there before
	changed []bool
	surplus []bool             // which of them the bucket has no more
	locked  []bool             // which of them are locked: all of them, but for those that lockFree left out
	index   map[bucket.Key]int // of the first row of each bucket
}

// newLockedRows returns the rows of the buckets, not yet read.
func newLockedRows(calls [][]bucket.Ask) *lockedRows {
	l := &lockedRows{index: make(map[bucket.Key]int)}
	for _, asks := range calls {
		rows, _ := bucket.RowsOf(asks)
		l.rows = append(l.rows, rows...)
	}
	slices.SortFunc(l.rows, func(a, b bucket.Ask) int { return a.Key.Compare(b.Key) })
	l.rows = slices.CompactFunc(l.rows, func(a, b bucket.Ask) bool { return a.Key == b.Key })
	l.prepare()
	return l
}

// prepare makes room for what is found in the rows.
func (l *lockedRows) prepare() {
	for i := range l.rows {
		l.index[l.rows[i].Key] = i
	}
	l.states, l.made = make([]bucket.State, len(l.rows)), make([]bool, len(l.rows))
	l.changed, l.locked, l.surplus = make([]bool, len(l.rows)), make([]bool, len(l.rows)), make([]bool, len(l.rows))
}

// lock locks and reads every row of the calls' buckets, after what is in batch and in the same round trip, in the
// transaction of s. In a transaction of its own it returns a heldError when somebody holds a row.
func (s *Session) lock(ctx context.Context, batch *pgx.Batch, calls ...[]bucket.Ask) (*lockedRows, error) {
	l, err := s.lockFree(ctx, batch, calls...)
	if err != nil {
		return nil, err
	}
	if i := slices.Index(l.locked, false); i >= 0 {
		return nil, &heldError{l.rows[i].Key}
	}
	return l, nil
}

// lockFree locks and reads the rows of the calls' buckets, after what is in batch and in the same round trip. In a
// transaction of its own it leaves out those that somebody holds, but for the one that it is to wait for, which it locks
// first. When the call has waited for many it waits for the others too, for a little. In a caller's transaction, which
// may hold rows already, it waits for all of them, in the order of locking.
func (s *Session) lockFree(ctx context.Context, batch *pgx.Batch, calls ...[]bucket.Ask) (*lockedRows, error) {
	l := newLockedRows(calls)
	if err := s.lockRows(ctx, batch, l); err != nil {
		return nil, err
	}
	for i := range l.rows { // what is decided on them brings them back to the present
		if l.locked[i] && l.rows[i].Terms.FromFuture(l.states[i], l.now) {
			s.owner.Mended(ctx, l.rows[i].Key.Name)
		}
	}
	return s.settle(ctx, l, calls)
}

// lockRows locks and reads the rows of l as lockFree says.
func (s *Session) lockRows(ctx context.Context, batch *pgx.Batch, l *lockedRows) error {
	if s.queue != nil {
		s.queue.Enter(ctx, l.rows)
	}
	if s.engine != nil {
		return s.lockEngine(ctx, l)
	}
	if s.routed() {
		return s.lockRouted(ctx, batch, l)
	}
	statement := s.statements.lock
	before, waited := batch.Len(), false
	if s.mode == ownTx {
		waited = s.queueWait(batch, l.rows)
		if s.waits < manyWaits {
			statement = s.statements.lockFree
		} else {
			batch.Queue(s.statements.boundWait, longWait(s.waits))
		}
	}
	between := batch.Len() - before
	s.queueLock(batch, statement, l.rows)
	err := s.send(ctx, batch, func(results pgx.BatchResults) error {
		err := skip(results, before)
		if err == nil && waited { // which may have made the row
			between--
			err = l.receive(results)
		}
		if err == nil {
			err = skip(results, between)
		}
		if err != nil {
			return err
		}
		return s.asShortWait(l.receive(results), l.rows)
	})
	if err == nil && statement == s.statements.lock && slices.Contains(l.locked, false) {
		err = fmt.Errorf("the statement left out some of %d rows", len(l.rows))
	}
	return err
}

// queueLock queues a statement that locks rows: buckets_lock.sql, which waits for them, or buckets_lock_free.sql.
func (s *Session) queueLock(batch *pgx.Batch, statement string, rows []bucket.Ask) {
	c := columnsOf(rows)
	batch.Queue(statement, c.names, c.keys, c.shards, c.capacities, c.stepUs, c.phases, s.now())
}

// receive reads the answers of a statement that locks rows.
func (l *lockedRows) receive(results pgx.BatchResults) error {
	rows, err := results.Query()
	if err != nil {
		return err
	}
	defer rows.Close()
	var k bucket.Key
	var found bucket.State
	var made bool
	columns := []any{&k.Name, &k.Key, &k.Shard, &found.Value, &found.TS, nil, nil, &l.now, &made}
	for rows.Next() {
		if found.Parts, err = scanWithParts(rows, columns, 5); err != nil {
			return err
		}
		i, asked := l.index[k]
		if !asked {
			return errors.New("the statement answered for a row that was not asked for")
		}
		l.states[i], l.made[i], l.locked[i] = found, made || l.made[i], true
	}
	return rows.Err()
}

// missing returns the first row of the asks that is not locked, if there is one.
func (l *lockedRows) missing(asks []bucket.Ask) (row bucket.Key, found bool) {
	if !slices.Contains(l.locked, false) {
		return bucket.Key{}, false
	}
	rows, _ := bucket.RowsOf(asks)
	for i := range rows {
		if k := rows[i].Key; !l.locked[l.index[k]] {
			return k, true
		}
	}
	return bucket.Key{}, false
}

// of returns the rows of a bucket.
func (l *lockedRows) of(a *bucket.Ask) (states []bucket.State, changed []bool) {
	first := l.index[a.FirstRow()]
	end := first + int(max(a.Terms.Shards, 1))
	return l.states[first:end], l.changed[first:end]
}

// decide says of each ask whether it is allowed. Nothing is taken.
func (l *lockedRows) decide(asks []bucket.Ask) []bucket.Answer {
	return bucket.Decide(asks, l.now, func(i int) []bucket.State {
		states, _ := l.of(&asks[i])
		return states
	})
}

// takeFor decides on c as take does, for as many units as there are where c asks for that.
func (l *lockedRows) takeFor(c *Call) {
	asks := c.Asks
	if c.UpTo > 0 {
		if c.Taken = bucket.MostUnits(asks, c.UpTo, l.decide); c.Taken > 0 {
			asks = bucket.Units(asks, c.Taken)
		}
	}
	c.Answers = l.take(asks)
}

// take decides on a call, all or nothing, as if it came after those decided before.
func (l *lockedRows) take(asks []bucket.Ask) []bucket.Answer {
	answers, after := l.decide(asks), make([][]bucket.State, len(asks))
	all := bucket.AllAllowed(answers)
	for i := range asks {
		states, _ := l.of(&asks[i])
		if after[i] = slices.Clone(states); all {
			bucket.Spend(asks, answers, i, after[i], l.now)
		}
	}
	if all {
		bucket.AlignFences(asks, func(i int) *bucket.State { return &after[i][0] })
	}
	for i := range asks {
		a := &asks[i]
		states, changed := l.of(a)
		shard := a.Terms.OfShard()
		for j := range states {
			after[i][j] = shard.FixClock(after[i][j], l.now)
			changed[j] = changed[j] || !after[i][j].Equal(states[j])
		}
		copy(states, after[i])
		answers[i].SetRows(a, after[i])
	}
	return answers
}

// charge takes amount from a bucket whatever it holds, or credits it when negative, unless the current step begins after
// the last that may be given back what was taken at an instant. It mirrors buckets_charge.sql.
func (l *lockedRows) charge(a *bucket.Ask, amount float64, taken int64) {
	if amount == 0 {
		return
	}
	states, changed := l.of(a)
	until := refundUntil(a.Terms, taken)
	switch {
	case a.Terms.Rule != nil && amount < 0:
		before := states[0]
		states[0] = a.Terms.Credit(before, l.now, -amount, until)
		changed[0] = changed[0] || !states[0].Equal(before)
		return
	case amount < 0 && a.Terms.Begin(l.now) > until:
		return
	}
	first := l.index[a.FirstRow()]
	for i := range states {
		isNew := l.made[first+i] && !changed[i]
		changed[i] = true
		if isNew && amount < 0 { // it is full, and was so before
			states[i] = bucket.State{Value: max(states[i].Value, a.Most/float64(len(states))), TS: min(a.Terms.Begin(l.now), bucket.LongAgo)}
		}
	}
	if amount > 0 {
		a.Terms.ChargeRows(states, l.now, amount)
		return
	}
	a.Terms.CreditRows(states, l.now, -amount, a.Most)
}

// fill sets the rows of the buckets to their capacity.
func (l *lockedRows) fill(asks []bucket.Ask) {
	for i := range asks {
		states, changed := l.of(&asks[i])
		asks[i].Terms.FillRows(states, l.now)
		for j := range states {
			changed[j] = true
		}
	}
}

// fixClocks brings the rows back to the present that a wrong clock has left in the future.
func (l *lockedRows) fixClocks() {
	for i := range l.rows {
		before := l.states[i]
		l.states[i] = l.rows[i].Terms.FixClock(before, l.now)
		l.changed[i] = !l.states[i].Equal(before)
	}
}

// save writes the rows that were changed, and deletes those that were made for nothing.
func (s *Session) save(ctx context.Context, l *lockedRows) error {
	if s.engine != nil {
		return s.saveEngine(l)
	}
	batch := &pgx.Batch{}
	s.queueSave(batch, l)
	return s.finish(ctx, batch, l.rows)
}

// finish sends the last statements of a transaction. When they have to wait, for a lock on their table or for its next page,
// the short lock_timeout of an earlier statement ends the wait in a transaction of the session's own.
func (s *Session) finish(ctx context.Context, batch *pgx.Batch, rows []bucket.Ask) error {
	return s.asShortWait(s.conn.SendBatch(ctx, batch).Close(), rows)
}

// queueSave queues what save sends, if there is anything.
func (s *Session) queueSave(batch *pgx.Batch, l *lockedRows) {
	if s.routed() {
		s.queueSaveRouted(batch, l)
		return
	}
	var rows, unmade []bucket.Ask
	var states []bucket.State
	for i := range l.rows {
		switch {
		case l.changed[i]:
			rows, states = append(rows, l.rows[i]), append(states, l.states[i])
		case l.made[i], l.surplus[i]:
			unmade = append(unmade, l.rows[i])
		}
	}
	if len(rows) > 0 {
		names, keys, shards := keysOf(rows)
		values, ts, taken, leases := statesAsColumns(states)
		batch.Queue(s.statements.save, names, keys, shards, values, ts, taken, leases)
	}
	if len(unmade) > 0 {
		names, keys, shards := keysOf(unmade)
		batch.Queue(s.statements.unmake, names, keys, shards)
	}
}

// takeByLocking takes as Take does, on locked rows: in the transaction that the session is of, else in one of its own.
func (s *Session) takeByLocking(ctx context.Context, asks []bucket.Ask) (answers []bucket.Answer, err error) {
	err = s.ensureTx(ctx, func(tx *Session) (err error) {
		answers, err = tx.takeLocked(ctx, asks)
		return err
	})
	return answers, err
}

// takeLocked is takeCallLocked for what asks cost.
func (s *Session) takeLocked(ctx context.Context, asks []bucket.Ask) ([]bucket.Answer, error) {
	c := Call{Asks: asks}
	err := s.takeCallLocked(ctx, &c)
	return c.Answers, err
}

// takeCallLocked decides on a call by locking all of its rows, in the transaction of s. A refusal leaves none of them
// locked, and none that it made, unless there was a clock to be put right.
func (s *Session) takeCallLocked(ctx context.Context, c *Call) error {
	if s.routed() {
		return s.takeCallRouted(ctx, c)
	}
	batch := &pgx.Batch{}
	s.queueSavepoint(batch)
	l, err := s.lock(ctx, batch, c.Asks)
	if errors.Is(err, ErrUnknownWindows) {
		return errors.Join(err, s.undo(ctx))
	}
	if err != nil {
		return err
	}
	l.takeFor(c)
	if bucket.AllAllowed(c.Answers) || slices.Contains(l.changed, true) {
		return s.save(ctx, l)
	}
	return s.undo(ctx)
}
