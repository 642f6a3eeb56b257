package store

import (
	"context"
	"hash/fnv"
	"math"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

const (
	// pruneBlocks is how many blocks Prune looks through at once: some 1,500 rows.
	pruneBlocks = 32
	// PruneIdle is how long a bucket must have been full: the tolerance for wrong clocks at least.
	PruneIdle = bucket.ClockTolerance
)

// PrunePages are the parts of the buckets table that Prune looks through, each in a transaction.
type PrunePages struct {
	first, blocks int64 // the next block, and how many the table has; in a table that Citus distributes, unknown
	done          bool
}

// IsDone reports whether all have been looked through.
func (p *PrunePages) IsDone() bool { return p.done || p.first >= p.blocks }

// OnePage returns a PrunePages of one part.
func OnePage() *PrunePages { return &PrunePages{blocks: 1} }

// Next returns the part that is looked through, and goes on to the one after it.
func (p *PrunePages) Next() (first, end int64) {
	first = p.first
	p.first += pruneBlocks
	return first, p.first
}

// PrunePages returns parts of the table.
func (postgres) PrunePages(ctx context.Context, u *Unit) (*PrunePages, error) {
	if u.IsRouted() {
		return &PrunePages{blocks: math.MaxInt64}, nil
	}
	const size = `SELECT pg_relation_size($1::text::regclass) / current_setting('block_size')::bigint`
	rows, err := u.conn.Query(ctx, size, u.Table())
	if err != nil {
		return nil, err
	}
	p := &PrunePages{}
	_, err = pgx.ForEachRow(rows, []any{&p.blocks}, func() error { return nil })
	return p, err
}

// Prune deletes them by buckets_prune.sql, or by prune_rows_1.
func (postgres) Prune(ctx context.Context, u *Unit, p *PrunePages,
	termsOf map[string][]bucket.Terms,
) (deleted int64, gotLock bool, err error) {
	if gotLock, err = u.LockPruning(ctx); !gotLock {
		return 0, false, err
	}
	first, end := p.Next()
	if u.IsRouted() { // each of many shards has these blocks
		end, p.first, p.done = first+1, first+1, len(termsOf) == 0
	}
	for name, terms := range termsOf {
		c := columnsOf(distinct(terms))
		n, err := u.pruneName(ctx, p, name, c.capacities, c.rates, c.stepUs, c.steps,
			first, end, PruneIdle.Microseconds(), u.AsOf())
		if err != nil {
			return 0, true, err
		}
		deleted += n
	}
	return deleted, true, nil
}

// pruneName deletes the spare rows of a name.
func (u *Unit) pruneName(ctx context.Context, p *PrunePages, parameters ...any) (deleted int64, err error) {
	if !u.IsRouted() { // a driver of database/sql counts the rows of Exec only
		tag, err := u.conn.Exec(ctx, u.statements.prune, parameters...)
		return tag.RowsAffected(), err
	}
	rows, err := u.conn.Query(ctx, u.statements.pruneRows, parameters...)
	if err != nil {
		return 0, err
	}
	_, err = pgx.ForEachRow(rows, []any{&deleted, &p.done}, func() error { return nil })
	return deleted, err
}

// IsSpare returns what reports whether a row has been full under each of the terms, long enough before now.
func IsSpare(terms []bucket.Terms, now int64) func(bucket.State) bool {
	rows, until := distinct(terms), now-PruneIdle.Microseconds()
	return func(s bucket.State) bool { return isSpare(s, rows, until) }
}

// isSpare reports whether a row was full under the terms of each ask at until. It mirrors buckets_prune.sql.
func isSpare(s bucket.State, rows []bucket.Ask, until int64) bool {
	since := s.TS
	if s.Parts != nil && len(s.Parts.Taken) > 0 {
		since += int64(s.Parts.Taken[0])
	}
	late := s.Parts != nil && slices.ContainsFunc(s.Parts.Leases, func(end int64) bool { return end > until })
	if s.TS > until || late {
		return false
	}
	return !slices.ContainsFunc(rows, func(a bucket.Ask) bool {
		t := &a.Terms
		value := s.Value
		if s.Capacity > t.Capacity { // the other way round it would be full earlier
			value = t.Carry(s).Value
		}
		return !(value+float64((until-since)/t.Step)*t.Rate/t.Steps >= t.Capacity)
	})
}

// distinct returns an ask for each of the distinct terms, as Prune compares rows with them.
func distinct(policies []bucket.Terms) (rows []bucket.Ask) {
	for _, t := range policies {
		t = t.Kind.Pruning(t)
		if !slices.ContainsFunc(rows, func(a bucket.Ask) bool { return a.Terms == t }) {
			rows = append(rows, bucket.Ask{Terms: t})
		}
	}
	return rows
}

// LockPruning takes the advisory lock that lets one process at a time prune the schema. It is held to the end of a
// transaction, so that it works through PgBouncer.
func (u *Unit) LockPruning(ctx context.Context) (gotLock bool, err error) {
	h := fnv.New64a()
	h.Write([]byte("pgratelimit prune "))
	h.Write([]byte(u.schema))
	rows, err := u.conn.Query(ctx, `SELECT pg_try_advisory_xact_lock($1), row_security_active($2::text)`, int64(h.Sum64()),
		u.Table())
	if err != nil {
		return false, err
	}
	var filtered bool
	_, err = pgx.ForEachRow(rows, []any{&gotLock, &filtered}, func() error { return nil })
	if err == nil && filtered {
		err = u.CheckHidden(ctx)
	}
	return gotLock && err == nil, err
}
