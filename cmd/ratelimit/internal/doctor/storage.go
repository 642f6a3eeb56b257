package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/migrations"
)

const (
	// maxLeaves limits the tables and partitions that are checked, and maxNamed the names in a finding.
	maxLeaves = 1000
	maxNamed  = 5
	// minUpdates is the number of updates from which their statistics count, and minHotShare the share of them that should
	// touch no index.
	minUpdates  = 1000
	minHotShare = 0.7
	// maxDead is the number of dead rows that is acceptable even with few live ones. From the size minBloat on, a table
	// should have fewer than maxRowBytes for each row.
	maxDead     = 10_000
	minBloat    = 64 << 20
	maxRowBytes = 4000
)

// leaf is a table or a partition, with its statistics.
type leaf struct {
	table    string // the name of the table, or of the partitioned table
	name     string // quoted
	settings map[string]string
	noVacuum bool // autovacuum is off for it
	unlogged bool
	bytes    int64
	small    bool // it has fewer pages than the migrations give it
	counted  bool // whether a VACUUM or an ANALYZE has counted live: statistics begin anew after a crash or an upgrade
	live     int64
	dead     int64
	updates  int64
	hot      int64
}

// leaves returns the tables with settings of their own, or their partitions.
func (e *examination) leaves(ctx context.Context, tx pgx.Tx) ([]leaf, error) {
	var tables []string
	for _, t := range knownTables() {
		if len(t.settings) > 0 {
			tables = append(tables, t.name)
		}
	}
	rows, err := tx.Query(ctx, `
		SELECT c.relname::text, format('%I.%I', ln.nspname, l.relname), l.relpersistence = 'u', coalesce(pg_catalog.pg_relation_size(l.oid), 0), -- it may be dropped meanwhile
			coalesce((SELECT jsonb_object_agg(option_name, option_value) FROM pg_catalog.pg_options_to_table(l.reloptions)), '{}'),
			EXISTS (SELECT FROM pg_catalog.pg_options_to_table(l.reloptions) WHERE option_name = 'autovacuum_enabled' AND NOT option_value::boolean),
			l.reltuples >= 0, greatest(coalesce(s.n_live_tup, 0), l.reltuples::bigint, 0), coalesce(s.n_dead_tup, 0), coalesce(s.n_tup_upd, 0), coalesce(s.n_tup_hot_upd, 0),
			-- with Citus the rows can be on other servers, and migrate up does not know the partitions of others
			pg_catalog.to_regclass('pg_catalog.pg_dist_partition') IS NULL AND (c.relkind = 'r' OR pg_catalog.pg_get_partkeydef(c.oid) = 'HASH (name, key)')
				AND coalesce(pg_catalog.pg_relation_size(l.oid), 0) < $4 * current_setting('block_size')::bigint
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
		LIMIT $3`, e.config.Schema, tables, maxLeaves, migrations.MinPages)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (l leaf, err error) {
		err = row.Scan(&l.table, &l.name, &l.unlogged, &l.bytes, &l.settings, &l.noVacuum, &l.counted, &l.live, &l.dead, &l.updates, &l.hot, &l.small)
		return l, err
	})
}

// lookAtStorage compares the storage of the tables with the migrations.
func (e *examination) lookAtStorage(ctx context.Context, tx pgx.Tx) (found []Finding, err error) {
	var vacuum, counts bool
	err = tx.QueryRow(ctx, `SELECT current_setting('autovacuum')::boolean, current_setting('track_counts')::boolean`).Scan(&vacuum, &counts)
	if err != nil {
		return found, err
	}
	if !vacuum || !counts {
		found = fault("Run as a superuser:\nALTER SYSTEM SET autovacuum = on;\nALTER SYSTEM SET track_counts = on;\nSELECT pg_reload_conf();",
			"Autovacuum is off for the whole server (autovacuum or track_counts): buckets grow with every Take, and calls become slow.")
	}
	leaves, err := e.leaves(ctx, tx)
	if err != nil {
		return found, err
	}
	for _, l := range leaves {
		found = append(found, l.lookAtSettings()...)
	}
	whole, err := wholePages(ctx, tx, leaves)
	if err != nil {
		return found, err
	}
	found = append(found, whole...)
	if i := slices.IndexFunc(leaves, func(l leaf) bool { return l.small }); i >= 0 {
		found = append(found, warning("Run ratelimit migrate up, or migrations.Up in a program.",
			"%s has less than %d pages, because it was restored, truncated or rewritten: calls may read all of it, also while it grows.",
			leaves[i].name, migrations.MinPages)...)
	}
	if len(found) == 0 {
		found = ok("The storage of the tables is as the migrations set it.")
	}
	return found, nil
}

// wholePages returns a note if the log holds whole pages of a large table of buckets, and does not compress them.
func wholePages(ctx context.Context, tx pgx.Tx, leaves []leaf) ([]Finding, error) {
	var bytes int64
	for _, l := range leaves {
		if l.table == "buckets" {
			bytes += l.bytes
		}
	}
	var isOff bool
	var method string
	err := tx.QueryRow(ctx, `SELECT setting = 'off', CASE WHEN 'lz4' = ANY (enumvals) THEN 'lz4' ELSE 'on' END
		FROM pg_catalog.pg_settings WHERE name = 'wal_compression'`).Scan(&isOff, &method)
	if err != nil || !isOff || bytes < minBloat {
		return nil, err
	}
	return note("Run as a superuser:\nALTER SYSTEM SET wal_compression = "+method+";\nSELECT pg_reload_conf();",
		"wal_compression is off, and the buckets take %d MB: after each checkpoint, the first Take on a page writes 4 kB of log instead of a quarter of that.",
		bytes>>20), nil
}

// few returns the first of the worst findings, and the number of the others.
func few(found []Finding) []Finding {
	if len(found) <= maxNamed {
		return found
	}
	slices.SortStableFunc(found, func(a, b Finding) int { return b.Level.badness() - a.Level.badness() })
	last := found[maxNamed-1]
	last.Says += fmt.Sprintf(" So it is, or less bad, with %d more.", len(found)-maxNamed)
	return append(found[:maxNamed-1:maxNamed-1], last)
}

// lookAtSettings compares the storage parameters of a table with the migrations.
func (l *leaf) lookAtSettings() (found []Finding) {
	if l.noVacuum {
		found = append(found, fault("Run as the owner of the table:\nALTER TABLE "+l.name+" RESET (autovacuum_enabled);\nVACUUM "+l.name+";",
			"Autovacuum is off for %s: it grows with every Take, and calls become slow.", l.name)...)
	}
	if l.unlogged {
		found = append(found, note("If this is not intended, run as the owner of the table, which is locked meanwhile:\nALTER TABLE "+l.name+" SET LOGGED;",
			"%s is UNLOGGED: a crash of the server empties it, and a standby does not have it.", l.name)...)
	}
	var differs, wanted []string
	for _, want := range settingsOf(l.table) {
		is, isSet := l.settings[want.name]
		switch {
		case want.name == "fillfactor": // a lower one leaves more room
			is = cmp.Or(is, "100")
			if len(is) > len(want.value) || is > want.value { // both are from 10 to 100
				differs = append(differs, "a fillfactor of "+is)
				wanted = append(wanted, "fillfactor = "+want.value)
			}
		case !isSet: // another value may be intended
			differs = append(differs, "no "+want.name)
			wanted = append(wanted, want.name+" = "+want.value)
		}
	}
	if len(differs) > 0 {
		found = append(found, warning("Run as the owner of the table; full pages get room when their rows change:\nALTER TABLE "+l.name+
			" SET ("+strings.Join(wanted, ", ")+");",
			"%s has %s: updates find no room on their page and write to the index, or dead rows stay for longer.", l.name, strings.Join(differs, ", "))...)
	}
	return found
}

// lookAtHot checks the share of updates that touch no index (HOT).
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
			found = append(found, warning("Correct the findings of the checks storage and transactions, and then reset the statistics as a superuser:\n"+
				"SELECT pg_stat_reset_single_table_counters("+literal(l.name)+"::regclass);",
				"%.0f %% of the %d updates of %s wrote to the index, of which few should: their page had no room, or an open transaction kept the dead rows on it.",
				100*(1-share), l.updates, l.name)...)
		}
	}
	switch {
	case len(found) > 0:
	case updates < minUpdates:
		found = ok("There were %d updates of buckets, too few for a finding.", updates)
	default:
		found = ok("%.1f %% of %d updates of buckets touched no index.", 100*float64(hot)/float64(updates), updates)
	}
	return found, nil
}

// lookAtBloat checks dead rows, and the size of the table.
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
			found = append(found, warning("Correct the findings of the checks storage and transactions, and then run as the owner of the table:\nVACUUM "+l.name+";",
				"%s has %d dead rows and %d live ones: autovacuum does not keep up.", l.name, l.dead, l.live)...)
		case l.counted && l.bytes > minBloat && each > maxRowBytes:
			found = append(found, warning("New rows use the free space. To return it to the system, run as the owner of the table when there are few calls, because it locks the table:\n"+
				"VACUUM FULL "+l.name+";",
				"%s has %d MiB for %d rows, which is %d bytes each: it was larger, or dead rows stayed for long.", l.name, l.bytes>>20, l.live, each)...)
		}
	}
	if len(found) == 0 {
		found = ok("The tables have %d rows in %d MiB, and few dead ones.", live, bytes>>20)
	}
	return found, nil
}

// lookAtPartitions checks whether a partitioned table has a partition for each bucket.
func (e *examination) lookAtPartitions(ctx context.Context, tx pgx.Tx) ([]Finding, error) {
	var strategy *string
	var leaves int64
	var hasDefault bool
	var covered *float64 // the share of the hashes that has a partition; nil: not partitioned by a hash
	var locks int64      // the room in the server's lock table for each connection
	err := tx.QueryRow(ctx, `
		SELECT p.partstrat::text, coalesce(p.partdefid, 0) <> 0,
			(SELECT count(*) FROM pg_catalog.pg_inherits i WHERE i.inhparent = c.oid),
			(SELECT sum(1.0 / substring(pg_catalog.pg_get_expr(k.relpartbound, k.oid) FROM 'modulus (\d+)')::float8)
				FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class k ON k.oid = i.inhrelid WHERE i.inhparent = c.oid)::float8,
			current_setting('max_locks_per_transaction')::bigint
		FROM pg_catalog.pg_class c
		JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		LEFT JOIN pg_catalog.pg_partitioned_table p ON p.partrelid = c.oid
		WHERE n.nspname = $1 AND c.relname = 'buckets'`, e.config.Schema).Scan(&strategy, &hasDefault, &leaves, &covered, &locks)
	table := e.quoted("buckets")
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return note("First correct the finding of the check migrations.", "There is no table of buckets."), nil
	case err != nil:
		return nil, err
	case strategy == nil:
		return ok("The buckets are in one table."), nil
	case *strategy == "h" && (covered == nil || *covered < 1-1e-9):
		return fault("Create the partitions of the missing remainders, with CREATE TABLE ... PARTITION OF.",
			"%s is partitioned by hash, and some hashes have no partition: a Take of such a key fails.", table), nil
	case *strategy != "h" && !hasDefault:
		level := Warning
		if *strategy == "r" { // they may cover all
			level = Note
		}
		var settings []string
		for _, s := range settingsOf("buckets") {
			settings = append(settings, s.name+" = "+s.value)
		}
		return finding(level, "Run as the owner of the table:\nCREATE TABLE "+e.quoted("buckets_default")+" PARTITION OF "+table+" DEFAULT WITH ("+strings.Join(settings, ", ")+");",
			"%s has %d partitions and no default one: a Take of a name or key that is in none of them fails.", table, leaves), nil
	case locks < 2*(leaves+1):
		return warning(fmt.Sprintf("Run as a superuser, and restart the server:\nALTER SYSTEM SET max_locks_per_transaction = %d;", 2*(leaves+1)),
			"A statement locks all %d partitions of the buckets with their indexes, and the server has room for %d locks for each connection: "+
				"when many call at once, calls may fail with \"out of shared memory\".", leaves, locks), nil
	}
	return ok("The buckets are in %d partitions.", leaves), nil
}
