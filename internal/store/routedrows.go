package store

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// prunePage is how many rows Prune looks at in one transaction where they are on several servers.
const prunePage = 500

// PrunePages returns one part: Prune knows how far it has come by the last row that it has seen.
func (byRow) PrunePages(context.Context, *Unit) (*PrunePages, error) {
	return &PrunePages{blocks: 1}, nil
}

// Prune deletes spare rows of the next page: it finds rows that were left alone, locks those that nobody holds, and deletes those of them that are
// spare under their lock.
func (byRow) Prune(ctx context.Context, u *Unit, p *PrunePages, termsOf map[string][]bucket.Terms) (deleted int64, gotLock bool, err error) {
	if gotLock, err = u.lockPruning(ctx); !gotLock {
		return 0, false, err
	}
	deleted, err = u.pruneByRow(ctx, p, termsOf)
	return deleted, true, err
}

// pruneByRow is Prune, once no other process prunes.
func (u *Unit) pruneByRow(ctx context.Context, p *PrunePages, termsOf map[string][]bucket.Terms) (deleted int64, err error) {
	now, err := u.clock(ctx)
	if err != nil {
		return 0, err
	}
	until := now - pruneIdle.Microseconds()
	found, err := u.nextSpare(ctx, p, until, termsOf)
	if err != nil || len(found) == 0 {
		return 0, err
	}
	states, free, err := u.lockSpare(ctx, found)
	if err != nil {
		return 0, err
	}
	batch := &pgx.Batch{}
	for i, k := range found {
		if free[i] && isSpare(states[i], oneRowEach(termsOf[k.Name]), until) {
			batch.Queue(u.statements.routedDelete, keyOf(k)...)
		}
	}
	if batch.Len() == 0 {
		return 0, nil
	}
	return int64(batch.Len()), u.conn.SendBatch(ctx, batch).Close()
}

// nextSpare returns those rows of the next page that seem spare.
func (u *Unit) nextSpare(ctx context.Context, p *PrunePages, until int64, termsOf map[string][]bucket.Terms) (spare []bucket.Key, err error) {
	names := make([]string, 0, len(termsOf))
	for name := range termsOf {
		if name >= p.after.Name {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	if len(names) == 0 {
		p.done = true
		return nil, nil
	}
	if names[0] != p.after.Name {
		p.after = bucket.Key{Name: names[0], Shard: -1}
	}
	rows, err := u.conn.Query(ctx, u.statements.routedSpare, p.after.Name, until, p.after.Key, p.after.Shard, int32(prunePage))
	if err != nil {
		return nil, err
	}
	terms, seen, k := oneRowEach(termsOf[p.after.Name]), 0, bucket.Key{Name: p.after.Name}
	_, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (none struct{}, err error) {
		var state bucket.State
		seen++
		if state.Parts, err = scanWithParts(row, []any{&k.Key, &k.Shard, &state.Value, &state.TS, nil, nil}, 4); err != nil {
			return none, err
		}
		if isSpare(state, terms, until) {
			spare = append(spare, k)
		}
		p.after = k
		return none, nil
	})
	switch {
	case err != nil || seen == prunePage:
	case len(names) == 1:
		p.done = true
	default:
		p.after = bucket.Key{Name: names[1], Shard: -1}
	}
	return spare, err
}

// lockSpare locks those of the rows that nobody holds, and returns what they hold.
func (u *Unit) lockSpare(ctx context.Context, found []bucket.Key) (states []bucket.State, free []bool, err error) {
	batch := &pgx.Batch{}
	for _, k := range found {
		batch.Queue(u.statements.routedFree, keyOf(k)...)
	}
	states, free = make([]bucket.State, len(found)), make([]bool, len(found))
	err = u.send(ctx, batch, func(results pgx.BatchResults) (err error) {
		for i := range found {
			if states[i], free[i], err = receiveRow(results); err != nil {
				return err
			}
		}
		return nil
	})
	return states, free, err
}
