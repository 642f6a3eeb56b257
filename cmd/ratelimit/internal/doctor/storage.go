package doctor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
)

const (
	// maxLeaves bounds the tables and partitions that are looked at, and maxNamed those that a finding names.
	maxLeaves = 1000
	maxNamed  = 5
	// minUpdates is how many updates have to have been made for their kind to say something, and minHotShare is how many of
	// them have to have touched no index.
	minUpdates  = 1000
	minHotShare = 0.7
	// maxDead is how many dead rows there may be however few live ones, and minBloat how large a table is at the least of
	// which the bytes of a row say something, which are less than maxRowBytes.
	maxDead     = 10_000
	minBloat    = 64 << 20
	maxRowBytes = 4000
)

// leaf is a table, or a partition of one, with what the statistics say of it.
type leaf struct {
	table    string // that it is, or that it is a partition of
	name     string // quoted
	settings []setting
	unlogged bool
	bytes    int64
	counted  bool // whether live was counted by a VACUUM or an ANALYZE: statistics begin anew after a crash or an upgrade
	live     int64
	dead     int64
	updates  int64
	hot      int64
}

// leaves returns the tables with settings of their own, or their partitions.
func (e *examination) leaves(ctx context.Context, tx pgx.Tx) ([]leaf, error) {
	rows, err := tx.Query(ctx, `
		SELECT c.relname::text, format('%I.%I', ln.nspname, l.relname), coalesce(l.reloptions, '{}'), l.relpersistence = 'u', pg_catalog.pg_relation_size(l.oid),
			l.reltuples >= 0, greatest(coalesce(s.n_live_tup, 0), l.reltuples::bigint, 0), coalesce(s.n_dead_tup, 0), coalesce(s.n_tup_upd, 0), coalesce(s.n_tup_hot_upd, 0)
		FROM pg_catalog.pg_class c
		JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		CROSS JOIN LATERAL (
			SELECT c.oid WHERE c.relkind = 'r'
			UNION ALL
			SELECT p.relid FROM pg_catalog.pg_partition_tree(c.oid) p WHERE c.relkind = 'p' AND p.isleaf
		) part
		JOIN pg_catalog.pg_class l ON l.oid = part.oid
		JOIN pg_catalog.pg_namespace ln ON ln.oid = l.relnamespace
		LEFT JOIN pg_catalog.pg_stat_all_tables s ON s.relid = l.oid
		WHERE n.nspname = $1 AND c.relname = ANY ($2::text[])
		ORDER BY 1, 2
		LIMIT $3`, e.config.Schema, slices.Sorted(maps.Keys(e.tables.settings)), maxLeaves)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (l leaf, err error) {
		var options []string
		var bytes *int64 // of a table that was dropped meanwhile
		err = row.Scan(&l.table, &l.name, &options, &l.unlogged, &bytes, &l.counted, &l.live, &l.dead, &l.updates, &l.hot)
		l.settings = settingsOf(options)
		if bytes != nil {
			l.bytes = *bytes
		}
		return l, err
	})
}

// value returns a parameter, and whether it is set.
func value(settings []setting, name string) (string, bool) {
	i := slices.IndexFunc(settings, func(s setting) bool { return s.name == name })
	if i < 0 {
		return "", false
	}
	return settings[i].value, true
}

// lookAtStorage compares how the tables are kept with how the migrations made them.
func (e *examination) lookAtStorage(ctx context.Context, tx pgx.Tx) (found []Finding, err error) {
	var vacuum, counts bool
	err = tx.QueryRow(ctx, `SELECT current_setting('autovacuum')::boolean, current_setting('track_counts')::boolean`).Scan(&vacuum, &counts)
	if err != nil {
		return found, err
	}
	if !vacuum || !counts {
		found = append(found, Finding{
			Level: Fault, Says: "Autovacuum is off for the whole server (autovacuum or track_counts): buckets grow with every Take, and calls become slow.",
			Do: "Run as a superuser:\nALTER SYSTEM SET autovacuum = on;\nALTER SYSTEM SET track_counts = on;\nSELECT pg_reload_conf();",
		})
	}
	leaves, err := e.leaves(ctx, tx)
	if err != nil {
		return found, err
	}
	for i := range leaves {
		found = append(found, leaves[i].lookAtSettings(e.tables.settings[leaves[i].table])...)
	}
	if len(found) == 0 {
		found = ok("The tables are kept as the migrations made them.")
	}
	return found, nil
}

// few returns the first of the worst findings, and says how many others there are.
func few(found []Finding) []Finding {
	if len(found) <= maxNamed {
		return found
	}
	slices.SortStableFunc(found, func(a, b Finding) int { return b.Level.badness() - a.Level.badness() })
	last := found[maxNamed-1]
	last.Says += fmt.Sprintf(" So it is, or less bad, with %d more.", len(found)-maxNamed)
	return append(found[:maxNamed-1:maxNamed-1], last)
}

// lookAtSettings compares the parameters of a table with those that it was made with.
func (l *leaf) lookAtSettings(made []setting) (found []Finding) {
	if is, set := value(l.settings, "autovacuum_enabled"); set && isOff(is) {
		found = append(found, Finding{
			Level: Fault, Says: fmt.Sprintf("Autovacuum is off for %s: it grows with every Take, and calls become slow.", l.name),
			Do: "Run as the owner of the table:\nALTER TABLE " + l.name + " RESET (autovacuum_enabled);\nVACUUM " + l.name + ";",
		})
	}
	if l.unlogged {
		found = append(found, Finding{
			Level: Note, Says: fmt.Sprintf("%s is UNLOGGED: a crash of the server empties it, and a standby does not have it.", l.name),
			Do: "Where that is not meant to be so, run as the owner of the table, which locks it meanwhile:\nALTER TABLE " + l.name + " SET LOGGED;",
		})
	}
	var differs, wanted []string
	for _, want := range made {
		is, set := value(l.settings, want.name)
		switch {
		case want.name == "fillfactor":
			if !set {
				is = "100"
			}
			if number(is) > number(want.value) {
				differs = append(differs, fmt.Sprintf("a fillfactor of %s", is))
				wanted = append(wanted, "fillfactor = "+want.value)
			}
		case !set: // somebody may have chosen another value
			differs = append(differs, "no "+want.name)
			wanted = append(wanted, want.name+" = "+want.value)
		}
	}
	if len(differs) > 0 {
		found = append(found, Finding{
			Level: Warning,
			Says: fmt.Sprintf("%s has %s: updates find no room on their page and write to the index, or dead rows stay for longer.",
				l.name, strings.Join(differs, ", ")),
			Do: "Run as the owner of the table; pages that are full get the room as their rows change:\nALTER TABLE " + l.name +
				" SET (" + strings.Join(wanted, ", ") + ");",
		})
	}
	return found
}

func isOff(value string) bool {
	on, err := strconv.ParseBool(value)
	return err == nil && !on || strings.EqualFold(value, "off") || strings.EqualFold(value, "no")
}

// number returns the number that a parameter is, and 0 where it is none.
func number(text string) float64 {
	n, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return 0
	}
	return n
}

// lookAtHot looks how many updates touch no index (HOT).
func (e *examination) lookAtHot(ctx context.Context, tx pgx.Tx) (found []Finding, err error) {
	leaves, err := e.leaves(ctx, tx)
	if err != nil {
		return found, err
	}
	var updates, hot int64
	for _, l := range leaves {
		if l.table != "buckets" {
			continue
		}
		updates, hot = updates+l.updates, hot+l.hot
		if share := float64(l.hot) / float64(l.updates); l.updates >= minUpdates && share < minHotShare {
			found = append(found, Finding{
				Level: Warning,
				Says: fmt.Sprintf("%.0f %% of the %d updates of %s wrote to the index, of which few should: their page had no room, or an open transaction kept the dead rows on it.",
					100*(1-share), l.updates, l.name),
				Do: "Mend what the checks storage and transactions say, and then, as a superuser, have the server count anew:\n" +
					"SELECT pg_stat_reset_single_table_counters(" + literal(l.name) + "::regclass);",
			})
		}
	}
	switch {
	case len(found) > 0:
	case updates < minUpdates:
		found = ok("There were %d updates of buckets, too few to say how they went.", updates)
	default:
		found = ok("%.1f %% of %d updates of buckets touched no index.", 100*float64(hot)/float64(updates), updates)
	}
	return found, nil
}

// lookAtBloat looks at dead rows, and at the room that rows take.
func (e *examination) lookAtBloat(ctx context.Context, tx pgx.Tx) (found []Finding, err error) {
	leaves, err := e.leaves(ctx, tx)
	if err != nil {
		return found, err
	}
	var bytes, live int64
	for _, l := range leaves {
		bytes, live = bytes+l.bytes, live+l.live
		switch each := l.bytes / max(l.live, 1); {
		case l.dead > maxDead+l.live:
			found = append(found, Finding{
				Level: Warning, Says: fmt.Sprintf("%s has %d dead rows and %d live ones: autovacuum does not keep up.", l.name, l.dead, l.live),
				Do: "Mend what the checks storage and transactions say, and then run as the owner of the table:\nVACUUM " + l.name + ";",
			})
		case l.counted && l.bytes > minBloat && each > maxRowBytes:
			found = append(found, Finding{
				Level: Warning, Says: fmt.Sprintf("%s has %d MiB for %d rows, which is %d bytes each: it was larger, or dead rows stayed for long.", l.name, l.bytes>>20, l.live, each),
				Do: "Rows that come fill it again. To give it back to the system run as the owner of the table, at an hour when nobody calls, since it locks the table:\n" +
					"VACUUM FULL " + l.name + ";",
			})
		}
	}
	if len(found) == 0 {
		found = ok("The tables have %d rows in %d MiB, and few dead ones.", live, bytes>>20)
	}
	return found, nil
}

// lookAtPartitions looks whether there is a partition for each bucket, where the table was made a partitioned one.
func (e *examination) lookAtPartitions(ctx context.Context, tx pgx.Tx) (found []Finding, err error) {
	var strategy *string
	var leaves int64
	var hasDefault bool
	var covered *float64 // of a hash partitioned table: the share of the hashes that has a partition
	var locks int64      // for which the server has room for each connection
	err = tx.QueryRow(ctx, `
		SELECT p.partstrat::text, coalesce(p.partdefid, 0) <> 0,
			(SELECT count(*) FROM pg_catalog.pg_inherits i WHERE i.inhparent = c.oid),
			(SELECT sum(1.0 / substring(pg_catalog.pg_get_expr(k.relpartbound, k.oid) FROM 'modulus (\d+)')::float8)
				FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class k ON k.oid = i.inhrelid WHERE i.inhparent = c.oid)::float8,
			current_setting('max_locks_per_transaction')::bigint
		FROM pg_catalog.pg_class c
		JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		LEFT JOIN pg_catalog.pg_partitioned_table p ON p.partrelid = c.oid
		WHERE n.nspname = $1 AND c.relname = 'buckets'`, e.config.Schema).Scan(&strategy, &hasDefault, &leaves, &covered, &locks)
	table := pgx.Identifier{e.config.Schema, "buckets"}.Sanitize()
	switch {
	case err != nil && !errors.Is(err, pgx.ErrNoRows):
		return found, err
	case err != nil:
		found = []Finding{{Level: Note, Says: "There is no table of buckets.", Do: "Mend first what the check migrations says."}}
	case strategy == nil:
		found = ok("The buckets are in one table.")
	case *strategy == "h" && (covered == nil || *covered < 1-1e-9):
		found = []Finding{{
			Level: Fault, Says: fmt.Sprintf("%s is partitioned by hash, and some hashes have no partition: a Take of such a key fails.", table),
			Do: "Make the partitions of the remainders that are missing, with CREATE TABLE ... PARTITION OF.",
		}}
	case *strategy != "h" && !hasDefault:
		level := Warning
		if *strategy == "r" { // they may cover all
			level = Note
		}
		found = []Finding{{
			Level: level, Says: fmt.Sprintf("%s has %d partitions and no default one: a Take of a name or key that is in none of them fails.", table, leaves),
			Do: "Run as the owner of the table:\nCREATE TABLE " + pgx.Identifier{e.config.Schema, "buckets_default"}.Sanitize() +
				" PARTITION OF " + table + " DEFAULT WITH (" + e.with("buckets") + ");",
		}}
	case locks < 2*(leaves+1):
		found = []Finding{{
			Level: Warning,
			Says: fmt.Sprintf("The buckets are in %d partitions, which a statement locks with their indexes, and the server is set up for %d locks for each connection: "+
				"when many call at once, calls may fail with \"out of shared memory\".", leaves, locks),
			Do: fmt.Sprintf("Run as a superuser, and restart the server:\nALTER SYSTEM SET max_locks_per_transaction = %d;", 2*(leaves+1)),
		}}
	default:
		found = ok("The buckets are in %d partitions.", leaves)
	}
	return found, nil
}

// with returns the parameters of a table as a statement has them.
func (e *examination) with(table string) string {
	var list []string
	for _, s := range e.tables.settings[table] {
		list = append(list, s.name+" = "+s.value)
	}
	return strings.Join(list, ", ")
}
