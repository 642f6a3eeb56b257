package store

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// settle settles the rows that l has locked by the terms that hold now, which the asks of the calls get. Where these say
// that a bucket has other rows than were thought, it locks again.
func (s *Session) settle(ctx context.Context, l *lockedRows, calls [][]bucket.Ask) (*lockedRows, error) {
	for slices.Contains(l.locked, true) { // else nothing says what time it is
		l.advance()
		more := setNow(calls, l.now)
		if slices.ContainsFunc(calls, bucket.AnyUnknown) {
			return nil, ErrUnknownWindows
		}
		if !more {
			s.settleAll(l, calls)
			break
		}
		all := newLockedRows(calls)
		for i := range all.rows {
			j, known := l.index[all.rows[i].Key]
			all.made[i] = known && l.made[j]
		}
		if err := s.lockRows(ctx, &pgx.Batch{}, all); err != nil {
			return nil, err
		}
		l = all
	}
	return l, nil
}

// setNow gives the asks the terms that hold now. It reports whether any is about more rows by these.
func setNow(calls [][]bucket.Ask, now int64) (more bool) {
	for _, asks := range calls {
		for i := range asks {
			if a := &asks[i]; a.Terms.Eras != nil {
				rows := a.RowCount()
				a.SetNow(now)
				more = more || a.RowCount() > rows
			}
		}
	}
	return more
}

// settleAll settles the rows of the buckets of which all are locked.
func (s *Session) settleAll(l *lockedRows, calls [][]bucket.Ask) {
	for _, asks := range calls {
		for i := range asks {
			a := &asks[i]
			if _, missing := l.missing(asks[i : i+1]); missing || a.Terms.Eras == nil {
				continue
			}
			if l.settle(a) && s.mode == ownTx {
				s.levelled.note(a)
			}
		}
	}
}

// advance moves the instant of the decision into the latest era that a row has seen: the statement has waited for it
// meanwhile.
func (l *lockedRows) advance() {
	for i := range l.rows {
		t, ts := l.rows[i].Terms, l.states[i].TS
		if t.Eras == nil || !l.locked[i] || l.made[i] || ts <= l.now || t.FromFuture(l.states[i], l.now) {
			continue
		}
		if since, _ := t.At(ts).Span(); since-l.now <= bucket.ClockTolerance.Microseconds() {
			l.now = max(l.now, since)
		}
	}
}

// settle settles the rows of a bucket. It reports whether they are known to be settled for whoever comes next, where the
// bucket had another number of rows.
func (l *lockedRows) settle(a *bucket.Ask) (wasLevelled bool) {
	first := l.index[a.FirstRow()]
	found := l.states[first : first+a.RowCount()]
	absent := make([]bool, len(found))
	for i := range found {
		absent[i] = l.made[first+i] && !l.changed[first+i]
	}
	wasLevelled = a.Terms.Reshaped() && a.Terms.IsLevelled(found, absent)
	all := a.Terms.Reshaped() && !wasLevelled && slices.Contains(absent, false) // rows are levelled together, or none is
	settled := a.Terms.SettleRows(found, absent, l.now)
	full := a.Terms.OfShard().Full(l.now)
	for i, state := range settled {
		if !all && (absent[i] && state.Equal(full) || state.Equal(found[i])) {
			found[i] = state
			continue
		}
		found[i], l.changed[first+i] = state, true
	}
	for i := len(settled); i < len(found); i++ {
		l.surplus[first+i] = all && !absent[i]
	}
	return wasLevelled
}
