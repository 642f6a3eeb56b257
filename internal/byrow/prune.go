package byrow

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// prunePage is how many rows Prune reads in one transaction if they are on several servers.
const prunePage = 500

// PrunePages returns one part: Prune knows how far it has come by the last row that it has seen.
func (Distributed) PrunePages(context.Context, *store.Unit) (*store.PrunePages, error) {
	return store.OnePage(), nil
}

// Prune deletes spare rows of the next page: it finds unused rows, locks those without a lock of another transaction, and deletes
// each if it is spare under its lock.
func (Distributed) Prune(ctx context.Context, u *store.Unit, p *store.PrunePages, termsOf map[string][]bucket.Terms) (deleted int64, gotLock bool, err error) {
	if gotLock, err = u.LockPruning(ctx); !gotLock {
		return 0, false, err
	}
	deleted, err = pruneByRow(ctx, u, p, termsOf)
	return deleted, true, err
}

// pruneByRow is Prune, once no other process prunes.
func pruneByRow(ctx context.Context, u *store.Unit, p *store.PrunePages, termsOf map[string][]bucket.Terms) (deleted int64, err error) {
	now, err := clock(ctx, u)
	if err != nil {
		return 0, err
	}
	found, err := nextSpare(ctx, u, p, now, termsOf)
	if err != nil || len(found) == 0 {
		return 0, err
	}
	states, free, err := lockSpare(ctx, u, found)
	if err != nil {
		return 0, err
	}
	batch := &pgx.Batch{}
	for i, k := range found {
		if free[i] && store.IsSpare(termsOf[k.Name], now)(states[i]) {
			batch.Queue(u.Statement(files, "row_delete"), keyOf(k)...)
			if deleted++; states[i].LastFence() != nil {
				batch.Queue(u.Statement(files, "row_lease_delete"), k.Name, k.Key, (*int64)(nil))
			}
		}
	}
	if batch.Len() == 0 {
		return 0, nil
	}
	return deleted, u.Conn().SendBatch(ctx, batch).Close()
}

// nextSpare returns those rows of the next page that seem spare.
func nextSpare(ctx context.Context, u *store.Unit, p *store.PrunePages, now int64, termsOf map[string][]bucket.Terms) (spare []bucket.Key, err error) {
	names := make([]string, 0, len(termsOf))
	for name := range termsOf {
		if name >= p.After.Name {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	if len(names) == 0 {
		p.Done = true
		return nil, nil
	}
	if names[0] != p.After.Name {
		p.After = bucket.Key{Name: names[0], Shard: -1}
	}
	rows, err := u.Conn().Query(ctx, u.Statement(files, "row_spare"), p.After.Name, now-store.PruneIdle.Microseconds(), p.After.Key, p.After.Shard, int32(prunePage))
	if err != nil {
		return nil, err
	}
	isSpare, seen, k := store.IsSpare(termsOf[p.After.Name], now), 0, bucket.Key{Name: p.After.Name}
	_, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (none struct{}, err error) {
		var state bucket.State
		seen++
		if state.Parts, err = store.ScanWithParts(row, []any{&k.Key, &k.Shard, &state.Value, &state.TS, &state.Capacity, nil, nil}, 5); err != nil {
			return none, err
		}
		if isSpare(state) {
			spare = append(spare, k)
		}
		p.After = k
		return none, nil
	})
	switch {
	case err != nil || seen == prunePage:
	case len(names) == 1:
		p.Done = true
	default:
		p.After = bucket.Key{Name: names[1], Shard: -1}
	}
	return spare, err
}

// lockSpare locks the rows that no transaction holds, and returns their states.
func lockSpare(ctx context.Context, u *store.Unit, found []bucket.Key) (states []bucket.State, free []bool, err error) {
	batch := &pgx.Batch{}
	for _, k := range found {
		batch.Queue(u.Statement(files, "row_free"), keyOf(k)...)
	}
	states, free = make([]bucket.State, len(found)), make([]bool, len(found))
	err = u.Send(ctx, batch, func(results pgx.BatchResults) (err error) {
		for i := range found {
			if states[i], free[i], err = receiveRow(results); err != nil {
				return err
			}
		}
		return nil
	})
	return states, free, err
}
