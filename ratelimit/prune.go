package ratelimit

import (
	"context"
	"fmt"
	"hash/fnv"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

const (
	pruneBlocks = 32          // blocks looked through in one transaction: some 1,500 rows
	pruneIdle   = time.Minute // how long a bucket must have been full; at least the tolerance for clocks

)

// Prune deletes the rows of the limits' buckets that have been full for a minute, and returns how many it
// deleted. It changes no decision, because a bucket without a row is full: it only frees the storage of
// keys that nobody uses any more. Name every limit with the policy it has now; rows of limits it is not
// told of, of buckets that owe, and with a ts in the future stay.
//
// Where a name is used under several policies, as the plans of several keys, which row has which is not in the
// database: a row is deleted when it is full under all of them. Name the limit once for each policy. Those that
// this Limiter was used with under the name are counted without, up to 16 of them; those that only
// other processes use have to be named, or rows of theirs are deleted that are not full, and the tokens taken from
// them are there again.
//
// It works through the table in small transactions at READ COMMITTED, beside live traffic: it never waits
// for a row. When another process prunes the schema, it returns 0 at once. Call it every few minutes or hours.
func (l *Limiter) Prune(ctx context.Context, limits ...Limit) (int64, error) {
	if err := l.ready(ctx, "prune"); err != nil {
		return 0, err
	}
	if l.pool == nil {
		return 0, fmt.Errorf("%w: Prune runs in transactions of its own and needs a Limiter that New returned, not one of WithTx", ErrInvalidConfig)
	}
	named := make(map[string][]bucket.Terms, len(limits))
	for _, limit := range limits {
		if limit.policy == nil {
			return 0, fmt.Errorf("%w: prune of the zero Limit; make limits with Define or NewLimit", ErrInvalidLimit)
		}
		named[limit.name] = append(named[limit.name], limit.terms)
	}
	blocks, err := l.blocks(ctx)
	if err != nil {
		return 0, during("prune", l.explain(err))
	}
	began, deleted := l.watch(), int64(0)
	for first := int64(0); first < blocks; first += pruneBlocks {
		n, alone, err := l.pruneRange(ctx, named, first)
		deleted += n
		if err != nil {
			return deleted, during("prune", l.explain(err))
		}
		if !alone {
			break
		}
	}
	l.tell(ctx, Pruned{Buckets: int(deleted), Elapsed: l.since(began)})
	return deleted, nil
}

// blocks returns the size of the buckets table.
func (l *Limiter) blocks(ctx context.Context) (int64, error) {
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	rows, err := l.pool.Query(ctx, `SELECT pg_relation_size($1::text::regclass) / current_setting('block_size')::bigint`,
		pgx.Identifier{l.config.Schema, "buckets"}.Sanitize())
	if err != nil {
		return 0, err
	}
	return pgx.CollectExactlyOneRow(rows, pgx.RowTo[int64])
}

// pruneRange deletes from the blocks that begin with first, in one transaction. alone is false, and
// nothing was done, when another pruner is at work.
func (l *Limiter) pruneRange(ctx context.Context, named map[string][]bucket.Terms, first int64) (deleted int64, alone bool, err error) {
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	err = l.together(ctx, "prune", func(tx *Limiter) error {
		deleted = 0
		rows, err := tx.db.Query(ctx, `SELECT pg_try_advisory_xact_lock($1)`, l.pruneLock())
		if err != nil {
			return err
		}
		if alone, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[bool]); err != nil || !alone {
			return err
		}
		for name, policies := range named {
			c := rowTerms(append(l.policies.seen(name), policies...))
			tag, err := tx.db.Exec(ctx, l.statements.prune, name, c.capacities, c.rates, c.steps, c.perPeriod,
				first, first+pruneBlocks, pruneIdle.Microseconds(), l.asOf())
			if err != nil {
				return err
			}
			deleted += tag.RowsAffected()
		}
		return nil
	})
	return deleted, alone, err
}

// rowTerms returns the distinct terms of the rows of buckets under the policies: a row of a bucket that is spread
// over several is deleted for itself.
func rowTerms(policies []bucket.Terms) (c columns) {
	var distinct []bucket.Terms
	for _, t := range policies {
		if t = t.OfShard(); !slices.Contains(distinct, t) {
			distinct = append(distinct, t)
		}
	}
	for _, t := range distinct {
		c.capacities, c.rates = append(c.capacities, t.Capacity), append(c.rates, t.Rate)
		c.steps, c.perPeriod = append(c.steps, t.Step), append(c.perPeriod, t.Steps)
	}
	return c
}

// pruneLock returns the advisory lock that lets one pruner of the schema work at a time. It is held to the end of a
// transaction, so that it works through PgBouncer.
func (l *Limiter) pruneLock() int64 {
	h := fnv.New64a()
	h.Write([]byte("pgratelimit prune "))
	h.Write([]byte(l.config.Schema))
	return int64(h.Sum64())
}
