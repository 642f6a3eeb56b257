package store

import (
	"context"
	"embed"
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

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

// files are the statements for the default schema.
//
//go:embed sql/*.sql
var files embed.FS

type statements struct {
	take, slide, decide, decideRows, decideGroups, spend, spendWindows string // the calls of functions
	acquire, acquireSet, release, releaseSet, renewLease               string
	reserve, reserveRows, settle, settleRows, settleCosts              string

	read, readRows, lock, held, prune, pruneRows string

	clock, boundWaits string
}

// Statement returns the statement in sql/name.sql of a package, which is written for the default schema, for the schema
// of the Store. Two packages must not have files of one name.
func (s *Store) Statement(files embed.FS, name string) string {
	known, found := s.others.Load(name)
	if !found {
		text, err := files.ReadFile("sql/" + name + ".sql")
		if err != nil {
			panic(err)
		}
		known, _ = s.others.LoadOrStore(name, inSchema(s.schema, string(text)))
	}
	text, _ := known.(string)
	return text
}

// Function returns the statement that calls a function of the schema with so many parameters, and selects columns of
// its result.
func (s *Store) Function(name string, parameters int, columns string) string {
	known, found := s.others.Load(name)
	if !found {
		known, _ = s.others.LoadOrStore(name, callOf(s.schema, name, parameters, columns))
	}
	text, _ := known.(string)
	return text
}

func inSchema(schema, statement string) string {
	for _, table := range []string{"buckets", "leases", "reservations", "fingerprint"} {
		name := pgx.Identifier{schema, table}.Sanitize()
		statement = strings.ReplaceAll(statement, "'"+DefaultSchema+"."+table+"'",
			"'"+strings.ReplaceAll(name, "'", "''")+"'")
		statement = strings.ReplaceAll(statement, DefaultSchema+"."+table, name)
	}
	return statement
}

func newStatements(schema string) (s statements) {
	for name, statement := range map[string]*string{
		"buckets_lock":  &s.lock,
		"buckets_held":  &s.held,
		"buckets_read":  &s.read,
		"buckets_prune": &s.prune,
		"clock":         &s.clock,
	} {
		text, err := files.ReadFile("sql/" + name + ".sql")
		if err != nil {
			panic(err)
		}
		*statement = inSchema(schema, string(text))
	}
	s.take = callOf(schema, "take_1", 15, "allowed, value, ts, capacity, now_us")
	s.slide = callOf(schema, "slide_1", 14, "allowed, value, ts, capacity, now_us, taken")
	s.decide = callOf(schema, "decide_1", 13, "allowed, value, ts, capacity, now_us")
	s.decideRows = callOf(schema, "decide_rows_1", 6, "allowed, value, ts, capacity, taken, leases, now_us, mended, held")
	s.decideGroups = callOf(schema, "decide_groups_1", 15, "ord, given, enough, value, ts, capacity, now_us")
	s.spend = callOf(schema, "spend_1", 13, "ord, allowed, value, ts, capacity, now_us")
	s.spendWindows = callOf(schema, "spend_windows_1", 12, "ord, allowed, value, ts, capacity, now_us, taken")
	s.acquire = callOf(schema, "acquire_1", 10, "allowed, value, ts, capacity, fence, until_us, last_us, leases, now_us")
	s.acquireSet = callOf(schema, "acquire_set_1", 13, "ord, allowed, value, ts, capacity, fence, until_us, last_us, "+
		"leases, now_us")
	s.release = callOf(schema, "release_1", 7, "held, now_us")
	s.releaseSet = callOf(schema, "release_set_1", 5, "ord, now_us")
	s.renewLease = callOf(schema, "renew_lease_1", 8, "held, now_us, until_us")
	s.reserve = callOf(schema, "reserve_1", 22, "allowed, value, ts, capacity, now_us, ready_us")
	s.reserveRows = callOf(schema, "reserve_rows_1", 15, "allowed, value, ts, capacity, taken, NULL::bigint[] AS "+
		"leases, now_us, mended, held, ready_us")
	s.settleRows = callOf(schema, "settle_rows_1", 6, "allowed, value, ts, capacity, taken, NULL::bigint[] AS leases, "+
		"now_us, mended, held")
	s.settle = callOf(schema, "settle_1", 18, "done, state, amount, name, key, shard, plan")
	s.settleCosts = callOf(schema, "settle_costs_1", 5, "done, state, names, keys, amounts")
	s.readRows = callOf(schema, "read_rows_1", 4, "value, ts, capacity, taken, leases, now_us, filtered")
	s.pruneRows = callOf(schema, "prune_rows_1", 9, "deleted, done")
	s.boundWaits = callOf(schema, "bound_waits_1", 1, "")
	return s
}

func callOf(schema, function string, parameters int, columns string) string {
	call := []byte("SELECT " + columns + " FROM " + pgx.Identifier{schema, function}.Sanitize() + "(")
	for n := 1; n <= parameters; n++ {
		call = strconv.AppendInt(append(call, '$'), int64(n), 10)
		call = append(call, ',')
	}
	call[len(call)-1] = ')'
	return string(call)
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

type columns struct {
	names, keys                             array[text]
	shards                                  array[integer]
	costs, capacities, rates, steps, lowest array[double]
	stepUs, phases                          array[bigint]
	since, until                            []*int64 // nil when the terms of all always hold
}

func columnsOf(asks []bucket.Ask) columns {
	n := len(asks)
	var c columns
	c.names, c.keys, c.shards = keysOf(asks)
	c.costs, c.lowest, c.stepUs, c.phases = make(array[double], n), make(array[double], n), make(array[bigint], n),
		make(array[bigint], n)
	c.capacities, c.rates, c.steps = make(array[double], n), make(array[double], n), make(array[double], n)
	for i := range asks {
		a := &asks[i]
		t := &a.Terms
		c.costs[i], c.lowest[i] = double(a.Cost), double(a.MinBalance)
		c.stepUs[i], c.phases[i] = bigint(t.Step), bigint(t.Phase)
		c.capacities[i], c.rates[i], c.steps[i] = double(t.Capacity), double(t.Rate), double(t.Steps)
	}
	c.since, c.until = spansOf(n, func(i int) *bucket.Terms { return &asks[i].Terms })
	return c
}

// spansOf returns what spanOf does for n terms, as array parameters: nil when all always hold.
func spansOf(n int, terms func(i int) *bucket.Terms) (since, until []*int64) {
	if !bucket.AnySpan(n, terms) {
		return nil, nil
	}
	since, until = make([]*int64, n), make([]*int64, n)
	for i := range n {
		since[i], until[i] = spanOf(terms(i))
	}
	return since, until
}

// spanOf returns the first and the last instant at which the terms hold, as parameters of a statement: null for terms
// that always do.
func spanOf(t *bucket.Terms) (since, until *int64) {
	if !t.HasSpan() {
		return nil, nil
	}
	first, next := t.Span()
	last := next - 1
	return &first, &last
}

func keysOf(asks []bucket.Ask) (names, keys array[text], shards array[integer]) {
	return keyColumns(len(asks), func(i int) bucket.Key { return asks[i].Key })
}

func keyColumns(n int, key func(i int) bucket.Key) (names, keys array[text], shards array[integer]) {
	names, keys, shards = make(array[text], n), make(array[text], n), make(array[integer], n)
	for i := range n {
		k := key(i)
		names[i], keys[i], shards[i] = text(k.Name), text(k.Key), integer(k.Shard)
	}
	return names, keys, shards
}

func (u *Unit) rowParameters(rows []bucket.Ask) []any {
	names, keys, shards := keysOf(rows)
	return []any{names, keys, shards, u.AsOf()}
}

// array is the array parameter of a statement. For a plain slice pgx puts each element into an interface, which
// allocates; from this type it gets pointers. Without prepared statements, as in the modes exec and simple_protocol,
// pgx formats it as an array literal.
type array[E element] []E

// element is one of text, integer, bigint and double, which pgx knows by the methods that return values.
type element interface {
	appendTo(literal []byte) []byte
}

type (
	text    string
	integer int32
	bigint  int64
	double  float64
)

// Dimensions tells pgx how long the array is.
func (a array[E]) Dimensions() []pgtype.ArrayDimension {
	if a == nil {
		return nil
	}
	return []pgtype.ArrayDimension{{Length: int32(len(a)), LowerBound: 1}}
}

// Index returns a pointer to an element.
func (a array[E]) Index(i int) any { return &a[i] }

// IndexType returns what Index returns.
func (a array[E]) IndexType() any { return (*E)(nil) }

// TextValue returns the array as a literal.
func (a array[E]) TextValue() (pgtype.Text, error) {
	if a == nil {
		return pgtype.Text{}, nil
	}
	literal := []byte{'{'}
	for i, e := range a {
		if i > 0 {
			literal = append(literal, ',')
		}
		literal = e.appendTo(literal)
	}
	return pgtype.Text{String: string(append(literal, '}')), Valid: true}, nil
}

// TextValue is for pgx.
func (t *text) TextValue() (pgtype.Text, error) {
	return pgtype.Text{String: string(*t), Valid: true}, nil
}

// appendTo quotes the text, because its characters may be special in a literal.
func (t text) appendTo(literal []byte) []byte {
	literal = append(literal, '"')
	for i := range len(t) {
		if t[i] == '"' || t[i] == '\\' {
			literal = append(literal, '\\')
		}
		literal = append(literal, t[i])
	}
	return append(literal, '"')
}

// Int64Value is for pgx.
func (n *integer) Int64Value() (pgtype.Int8, error) {
	return pgtype.Int8{Int64: int64(*n), Valid: true}, nil
}

func (n integer) appendTo(literal []byte) []byte { return bigint(n).appendTo(literal) }

// Int64Value is for pgx.
func (n *bigint) Int64Value() (pgtype.Int8, error) {
	return pgtype.Int8{Int64: int64(*n), Valid: true}, nil
}

func (n bigint) appendTo(literal []byte) []byte { return strconv.AppendInt(literal, int64(n), 10) }

// Float64Value is for pgx.
func (n *double) Float64Value() (pgtype.Float8, error) {
	return pgtype.Float8{Float64: float64(*n), Valid: true}, nil
}

func (n double) appendTo(literal []byte) []byte {
	return strconv.AppendFloat(literal, float64(n), 'g', -1, 64)
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
