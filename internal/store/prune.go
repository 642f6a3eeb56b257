package store

import (
	"context"
	"hash/fnv"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

const (
	// pruneBlocks is how many blocks Prune looks through at once, of all partitions together: some 1,500 rows.
	pruneBlocks = 32
	// pruneIdle is how long a bucket must have been full: the tolerance for wrong clocks at least.
	pruneIdle = bucket.ClockTolerance
)

// PrunePages are the parts of the buckets table that Prune looks through, each in a transaction.
type PrunePages struct {
	first, step, blocks int64      // the next block, how many of each partition are looked through at once, and how many the largest has
	after               bucket.Key // the last row that was looked at, where rows are on several servers
	done                bool
}

// IsDone reports whether all have been looked through.
func (p *PrunePages) IsDone() bool { return p.done || p.first >= p.blocks }

// PrunePages returns the parts of the buckets table. The size of a partitioned one is that of its partitions.
func (s *Session) PrunePages(ctx context.Context) (*PrunePages, error) {
	if s.engine != nil {
		return &PrunePages{blocks: engineBlocks}, nil
	}
	if err := s.LearnLayout(ctx); err != nil {
		return nil, err
	}
	if s.routed() {
		return &PrunePages{blocks: 1}, nil
	}
	const size = `
		SELECT greatest(pg_relation_size($1::text::regclass), max(pg_relation_size(p.relid))) / current_setting('block_size')::bigint,
			greatest($2::bigint / greatest(count(p.relid), 1), 1)
		FROM pg_partition_tree($1::text::regclass) AS p WHERE p.isleaf`
	rows, err := s.conn.Query(ctx, size, pgx.Identifier{s.schema, "buckets"}.Sanitize(), int64(pruneBlocks))
	if err != nil {
		return nil, err
	}
	p := &PrunePages{}
	_, err = pgx.ForEachRow(rows, []any{&p.blocks, &p.step}, func() error { return nil })
	return p, err
}

// Prune deletes the full buckets from the next of the pages, in the transaction of s, and goes on to the one after it: of each name
// those that are full under all of its terms. gotLock is false, and nothing was done, when another process prunes the schema.
func (s *Session) Prune(ctx context.Context, p *PrunePages, termsOf map[string][]bucket.Terms) (deleted int64, gotLock bool, err error) {
	if s.engine != nil {
		p.first = p.blocks
		deleted, err = s.pruneEngine(termsOf)
		return deleted, true, err
	}
	rows, err := s.conn.Query(ctx, `SELECT pg_try_advisory_xact_lock($1)`, s.pruneLock())
	if err != nil {
		return 0, false, err
	}
	if gotLock, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[bool]); err != nil || !gotLock {
		return 0, false, err
	}
	if s.routed() {
		deleted, err = s.pruneRouted(ctx, p, termsOf)
		return deleted, true, err
	}
	first := p.first
	p.first += p.step
	for name, terms := range termsOf {
		c := columnsOf(oneRowEach(terms))
		tag, err := s.conn.Exec(ctx, s.statements.prune, name, c.capacities, c.rates, c.stepUs, c.steps,
			first, p.first, pruneIdle.Microseconds(), s.now())
		if err != nil {
			return 0, true, err
		}
		deleted += tag.RowsAffected()
	}
	return deleted, true, nil
}

// oneRowEach returns an ask for each of the distinct terms, as they are to one row: a row of a bucket that is spread over
// several is deleted for itself.
func oneRowEach(policies []bucket.Terms) (rows []bucket.Ask) {
	for _, t := range policies {
		t = t.OfShard().Pruning()
		if !slices.ContainsFunc(rows, func(a bucket.Ask) bool { return a.Terms == t }) {
			rows = append(rows, bucket.Ask{Terms: t})
		}
	}
	return rows
}

// pruneLock returns the advisory lock that lets one process at a time prune the schema. It is held to the end of a
// transaction, so that it works through PgBouncer.
func (s *Session) pruneLock() int64 {
	h := fnv.New64a()
	h.Write([]byte("pgratelimit prune "))
	h.Write([]byte(s.schema))
	return int64(h.Sum64())
}
