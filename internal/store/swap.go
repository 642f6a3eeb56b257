package store

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// A call about one row of a limit on concurrency, outside of a transaction, reads the row, decides in Go, and writes what
// follows if the row is still the same: two round trips and one record in the log. A lock takes as many round trips and two records. When
// another was quicker, the call goes on to lock the row.

// readToSwap reads the row of the ask, with what bucket_swap.sql compares. swaps is false when that statement is not for it.
func (s *Session) readToSwap(ctx context.Context, a *bucket.Ask) (found bucket.Answer, swaps bool, err error) {
	rows, err := s.readRows(ctx, s.statements.read, []bucket.Ask{*a})
	if err == nil {
		err = answeredAll(rows, []bucket.Ask{*a})
	}
	if err != nil {
		return found, false, err
	}
	found = rows[0]
	parts := found.State.Parts
	return found, !a.Terms.FromFuture(found.State, found.Now) && (parts == nil || parts.Taken == nil), nil
}

// swap writes the state of a row, unless that is not as it was found: not there, where it was not. It reports whether it did.
func (s *Session) swap(ctx context.Context, k bucket.Key, found bucket.Answer, after bucket.State) (done bool, err error) {
	statement, arguments := s.statements.makeRow, []any{k.Name, k.Key, k.Shard, after.Value, after.TS, leasesOf(after)}
	if !found.Absent {
		statement, arguments = s.statements.swap, append(arguments, found.State.Value, found.State.TS, leasesOf(found.State))
	}
	rows, err := s.conn.Query(ctx, statement, arguments...)
	if err != nil {
		return false, err
	}
	written, err := pgx.CollectRows(rows, pgx.RowTo[bool])
	return len(written) > 0, err
}

// leasesOf returns the column leases of a row.
func leasesOf(s bucket.State) []int64 {
	if s.Parts == nil {
		return nil
	}
	return s.Parts.Leases
}

// isSwapped reports whether a call about the asks is one of those that read and write one row without a lock.
func (s *Session) isSwapped(asks []bucket.Ask) bool {
	return s.inSQL() && s.mode == alone && s.waitFor == nil && len(asks) == 1 && asks[0].Terms.Holds() && asks[0].Terms.Eras == nil
}

// takeBySwap answers a call for one row. answered is false when the row has to be locked.
func (s *Session) takeBySwap(ctx context.Context, c *Call) (answered bool, err error) {
	a := &c.Asks[0]
	found, swaps, err := s.readToSwap(ctx, a)
	if err != nil || !swaps {
		return false, err
	}
	c.one[0] = a.Decide(found)
	if c.Answers = c.one[:]; !c.one[0].Allowed {
		return true, nil
	}
	return s.swap(ctx, a.Key, found, c.one[0].State)
}
