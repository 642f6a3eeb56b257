package store

import (
	"context"
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/pgerr"
)

// savepoint is the place to which a call in a caller's transaction goes back, if it's refused after it has locked rows.
const savepoint = "ratelimit_take"

type postgres struct{}

// Read reads rows by buckets_read.sql, or by read_rows_1.
func (postgres) Read(ctx context.Context, u *Unit, rows []bucket.Ask) ([]bucket.Answer, error) {
	statement := u.statements.read
	if u.IsRouted() {
		statement = u.statements.readRows
	}
	found, err := u.conn.Query(ctx, statement, u.rowParameters(rows)...)
	if err != nil {
		return nil, err
	}
	answers, filtered, err := scanRows(found, rows)
	if err == nil && filtered {
		err = u.CheckHidden(ctx)
	}
	return answers, err
}

// QueueSavepoint queues the statement that sets the savepoint.
func QueueSavepoint(batch *pgx.Batch) { batch.Queue("SAVEPOINT " + savepoint) }

// BackToSavepoint goes back to the savepoint, and removes it.
func (u *Unit) BackToSavepoint(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), EndTimeout) // half a call must not stay
	defer cancel()
	batch := &pgx.Batch{}
	batch.Queue("ROLLBACK TO SAVEPOINT " + savepoint)
	batch.Queue("RELEASE SAVEPOINT " + savepoint)
	if err := u.conn.SendBatch(ctx, batch).Close(); err != nil {
		return fmt.Errorf("undo: %w", err)
	}
	return nil
}

// Spoil has a statement fail.
func (postgres) Spoil(ctx context.Context, u *Unit) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), EndTimeout)
	defer cancel()
	_, _ = u.conn.Exec(ctx, "ROLLBACK TO SAVEPOINT "+savepoint+"_cancelled") // there is none
}

// QueueBound queues bound_waits_1: a statement that holds rows and waits for another keeps them from others (SQLSTATE
// 55P03 ends the wait).
func (postgres) QueueBound(batch *pgx.Batch, u *Unit, most time.Duration) {
	batch.Queue(u.statements.boundWaits, strconv.FormatInt(most.Milliseconds(), 10))
}

// Look decides on each ask and takes nothing. A row that is absent counts as full. The answers are put into room if
// that has the capacity.
func (s *Session) Look(ctx context.Context, asks []bucket.Ask, room []bucket.Answer) ([]bucket.Answer, error) {
	found, err := s.Engine().Read(ctx, &s.Unit, asks)
	if err == nil {
		err = answeredAll(found, asks)
	}
	if err != nil {
		return nil, err
	}
	return (&bucket.Ledger{}).LookAt(asks, found, room), nil
}

// scanRows returns the answers of buckets_read.sql, and whether row level security applies to the role.
func scanRows(found pgx.Rows, rows []bucket.Ask) (answers []bucket.Answer, filtered bool, err error) {
	i := 0
	answers, err = pgx.CollectRows(found, func(row pgx.CollectableRow) (a bucket.Answer, err error) {
		var value, capacity *float64
		var ts *int64
		parts, err := scanWithParts(row, []any{&value, &ts, &capacity, nil, nil, &a.Now, &filtered}, 3)
		if err != nil {
			return a, err
		}
		if i == len(rows) {
			return a, fmt.Errorf("the statement answered for more than the %d rows that were asked for", len(rows))
		}
		a.State, a.Absent = rows[i].Terms.Full(a.Now), true
		if value != nil && ts != nil && capacity != nil {
			a.State, a.Absent = bucket.State{Value: *value, TS: *ts, Capacity: *capacity, Parts: parts}, false
		}
		i++
		return a, nil
	})
	return answers, filtered, err
}

// answeredAll returns an error when the answers are not one for each row.
func answeredAll(answers []bucket.Answer, rows []bucket.Ask) error {
	if len(answers) != len(rows) {
		return fmt.Errorf("the statement answered for %d of %d rows", len(answers), len(rows))
	}
	return nil
}

// QueueFiltered queues the question whether row level security applies to the role, for the buckets and the
// reservations. A read of filtered rows succeeds, so reads ask it in the same message.
func (u *Unit) QueueFiltered(batch *pgx.Batch) {
	batch.Queue(`SELECT row_security_active($1::text) OR row_security_active($2::text)`, u.Table(),
		pgx.Identifier{u.schema, "reservations"}.Sanitize())
}

// ReceiveFiltered reads the answer to QueueFiltered.
func ReceiveFiltered(results pgx.BatchResults) (filtered bool, err error) {
	err = results.QueryRow().Scan(&filtered)
	return filtered, err
}

// CheckHidden returns an error if row level security may hide rows from the role. It is another statement, so it is
// called if row level security applies at all.
func (u *Unit) CheckHidden(ctx context.Context) error {
	rows, err := u.conn.Query(ctx, "SELECT "+pgerr.Hidden("$1::text", "current_user", "buckets", "leases", "reservations"),
		pgx.QueryExecModeExec, u.schema)
	if err != nil {
		return err
	}
	hidden, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	return pgerr.HiddenError(u.schema, hidden)
}

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
	if gotLock, err = u.lockPruning(ctx); !gotLock {
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

// lockPruning takes the advisory lock that lets one process at a time prune the schema. It is held to the end of a
// transaction, so that it works through PgBouncer.
func (u *Unit) lockPruning(ctx context.Context) (gotLock bool, err error) {
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
