package store

import (
	"embed"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

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
