package store

import (
	"embed"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
)

// files are the statements for the default schema.
//
//go:embed sql/*.sql
var files embed.FS

// statements are the SQL texts for one schema.
type statements struct {
	take, slide, decide, decideRows, decideGroups, spend, spendWindows string // the calls of functions
	acquire, acquireSet, release, releaseSet, renewLease               string
	reserve, reserveRows, settle, settleRows                           string

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

// inSchema returns a statement with the tables of a schema.
func inSchema(schema, statement string) string {
	for _, table := range []string{"buckets", "leases", "reservations", "fingerprint"} {
		name := pgx.Identifier{schema, table}.Sanitize()
		statement = strings.ReplaceAll(statement, "'"+DefaultSchema+"."+table+"'",
			"'"+strings.ReplaceAll(name, "'", "''")+"'")
		statement = strings.ReplaceAll(statement, DefaultSchema+"."+table, name)
	}
	return statement
}

// newStatements returns the statements for a schema.
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
	s.readRows = callOf(schema, "read_rows_1", 4, "value, ts, capacity, taken, leases, now_us, filtered")
	s.pruneRows = callOf(schema, "prune_rows_1", 9, "deleted, done")
	s.boundWaits = callOf(schema, "bound_waits_1", 1, "")
	return s
}

// callOf returns the statement that calls a function of the schema with so many parameters, and selects columns of its
// result.
func callOf(schema, function string, parameters int, columns string) string {
	call := []byte("SELECT " + columns + " FROM " + pgx.Identifier{schema, function}.Sanitize() + "(")
	for n := 1; n <= parameters; n++ {
		call = strconv.AppendInt(append(call, '$'), int64(n), 10)
		call = append(call, ',')
	}
	call[len(call)-1] = ')'
	return string(call)
}
