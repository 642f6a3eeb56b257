package store

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// boldness remembers how batches fared that asked boldly, by buckets_spend_bold.sql, for rows that they hoped to find, with
// enough and held by nobody. After one that did not pay, some batches do not ask so: twice as many as the last time,
// and one fewer for each that paid since. So batches hardly ask in vain, however many rows are held, and for however long.
type boldness struct{ left, pause atomic.Int64 }

const (
	leastPause = 64 // batches
	mostPause  = 1024
)

// may reports whether a batch may ask boldly.
func (b *boldness) may() bool { return b.left.Load() <= 0 || b.left.Add(-1) < 0 }

// learn notes whether that paid. Batches that ask at the same moment may count one for the other.
func (b *boldness) learn(paid bool) {
	pause := b.pause.Load()
	if paid {
		if pause > 0 {
			b.pause.Store(pause - 1)
		}
		return
	}
	pause = min(max(2*pause, leastPause), mostPause)
	b.pause.Store(pause)
	b.left.Store(pause)
}

// takeBoldly takes what the groups and the clusters want, and reads what the others are about, in one round trip. It returns the
// groups that have to be asked for otherwise. tried is false when nothing was done: there is nothing to be bold about, or
// somebody holds a row.
func (s *Session) takeBoldly(ctx context.Context, groups []*group, cs *clusters, others []*Call) (left []*group, tried bool, err error) {
	if !slices.ContainsFunc(groups, (*group).isPlain) || slices.ContainsFunc(groups, func(g *group) bool { return g.calls[0].isSpread() }) || !s.bold.may() {
		return groups, false, nil
	}
	err = s.takeGroups(ctx, groups, cs, others, s.statements.spendBold)
	switch {
	case IsRetryable(err) || IsLockTimeout(err):
		s.bold.learn(false)
		return groups, false, nil
	case err != nil:
		return groups, true, err
	}
	left = slices.DeleteFunc(slices.Clone(groups), func(g *group) bool { return !g.isPlain() || !g.isHeld() })
	s.bold.learn(len(left) == 0 || len(groups) > leastPlain+3*len(left))
	return left, true, nil
}

// leastPlain is how many rows a batch has whose second round trip costs the server as much as asking boldly saved it. Each
// row that is asked for twice costs as much as three saved.
const leastPlain = 16

// isPlain reports whether the group can be asked for boldly: it is no sliding window, which has a statement of its own.
func (g *group) isPlain() bool { return !slides(&g.row) }

// receiveBold gives each group of a policy its answer from buckets_spend_bold.sql.
func receiveBold(results pgx.BatchResults, groups []*group) error {
	rows, err := results.Query()
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		r := readerOf(rows)
		place := r.int64()
		a := bucket.Answer{Allowed: r.bool(), State: bucket.State{Value: r.float64(), TS: r.int64()}, Now: r.int64()}
		switch {
		case r.err != nil:
			return r.err
		case place < 1 || place > int64(len(groups)):
			return errUnasked
		}
		g := groups[place-1]
		g.answer, g.found = a, true
	}
	return rows.Err()
}

// errUnasked is for an answer that nobody can use.
var errUnasked = errors.New("the statement answered for a bucket that was not asked for")
