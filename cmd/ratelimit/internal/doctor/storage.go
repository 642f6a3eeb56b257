package doctor

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/migrations"
)

const (
	// maxNamed limits the names in a finding.
	maxNamed = 5
	// maxDead is the number of dead rows that is acceptable even with few live ones.
	maxDead = 10_000
)

// stored is the storage of a table, with its statistics.
type stored struct {
	table    string // its name
	name     string // quoted
	settings map[string]string
	noVacuum bool // autovacuum is off for it
	unlogged bool
	small    bool // it has fewer pages than the migrations give it
	live     int64
	dead     int64
}

// stored returns the tables with settings of their own.
func (e *examination) stored(ctx context.Context, tx pgx.Tx) ([]stored, error) {
	var tables []string
	for _, t := range knownTables() {
		if len(t.settings) > 0 {
			tables = append(tables, t.name)
		}
	}
	rows, err := tx.Query(ctx, `
		SELECT c.relname::text, format('%I.%I', n.nspname, c.relname), c.relpersistence = 'u',
			coalesce((SELECT jsonb_object_agg(option_name, option_value) FROM pg_catalog.pg_options_to_table(c.reloptions)), '{}'),
			EXISTS (SELECT FROM pg_catalog.pg_options_to_table(c.reloptions) WHERE option_name = 'autovacuum_enabled' AND NOT option_value::boolean),
			greatest(coalesce(s.n_live_tup, 0), c.reltuples::bigint, 0), coalesce(s.n_dead_tup, 0),
			-- with Citus the rows can be on other servers
			pg_catalog.to_regclass('pg_catalog.pg_dist_partition') IS NULL
				AND coalesce(pg_catalog.pg_relation_size(c.oid), 0) < $3 * current_setting('block_size')::bigint
		FROM pg_catalog.pg_class c
		JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		LEFT JOIN pg_catalog.pg_stat_all_tables s ON s.relid = c.oid
		WHERE n.nspname = $1 AND c.relname = ANY ($2::text[]) AND c.relkind = 'r'
		ORDER BY 1`, e.config.Schema, tables, migrations.MinPages)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (s stored, err error) {
		err = row.Scan(&s.table, &s.name, &s.unlogged, &s.settings, &s.noVacuum, &s.live, &s.dead, &s.small)
		return s, err
	})
}

// lookAtStorage compares the storage of the tables with the migrations.
func (e *examination) lookAtStorage(ctx context.Context, tx pgx.Tx) (found []Finding, err error) {
	var vacuum, counts bool
	err = tx.QueryRow(ctx,
		`SELECT current_setting('autovacuum')::boolean, current_setting('track_counts')::boolean`).Scan(&vacuum, &counts)
	if err != nil {
		return found, err
	}
	if !vacuum || !counts {
		found = fault("Run as a superuser:\nALTER SYSTEM SET autovacuum = on;\nALTER SYSTEM SET track_counts = on;\nSELECT "+
			"pg_reload_conf();",
			"Autovacuum is off for the whole server (autovacuum or track_counts): buckets grow with every Take, and calls "+
				"become slow.")
	}
	tables, err := e.stored(ctx, tx)
	if err != nil {
		return found, err
	}
	for _, s := range tables {
		found = append(found, s.lookAtSettings()...)
	}
	if i := slices.IndexFunc(tables, stored.lacksPages); i >= 0 {
		found = append(found, warning("Run ratelimit migrate up, or migrations.Up in a program.",
			"%s has less than %d pages, because it was restored, truncated or rewritten: calls may read all of it, also while "+
				"it grows.",
			tables[i].name, migrations.MinPages)...)
	}
	if len(found) == 0 {
		found = ok("The storage of the tables is as the migrations set it.")
	}
	return found, nil
}

// lacksPages reports whether the table is too small, although it should keep its pages.
func (s stored) lacksPages() bool {
	return s.small && slices.Contains(settingsOf(s.table), setting{"vacuum_truncate", "off"})
}

// few returns the first of the worst findings, and the number of the others.
func few(found []Finding) []Finding {
	if len(found) <= maxNamed {
		return found
	}
	slices.SortStableFunc(found, func(a, b Finding) int { return b.Level.badness() - a.Level.badness() })
	last := found[maxNamed-1]
	last.Says += fmt.Sprintf(" %d more have the same problem, or a smaller one.", len(found)-maxNamed)
	return append(found[:maxNamed-1:maxNamed-1], last)
}

// lookAtSettings compares the storage parameters of a table with the migrations.
func (s *stored) lookAtSettings() (found []Finding) {
	if s.noVacuum {
		found = append(found, fault("Run as the owner of the table:\nALTER TABLE "+s.name+
			" RESET (autovacuum_enabled);\nVACUUM "+s.name+";",
			"Autovacuum is off for %s: it grows with every Take, and calls become slow.", s.name)...)
	}
	if s.unlogged {
		found = append(found, note("If this is not intended, run as the owner of the table, which is locked "+
			"meanwhile:\nALTER TABLE "+s.name+" SET LOGGED;",
			"%s is UNLOGGED: a crash of the server empties it, and a standby does not have it.", s.name)...)
	}
	var differs, wanted []string
	for _, want := range settingsOf(s.table) {
		is, isSet := s.settings[want.name]
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
		found = append(found, warning("Run as the owner of the table; full pages get room when their rows change:\nALTER "+
			"TABLE "+s.name+
			" SET ("+strings.Join(wanted, ", ")+");",
			"%s has %s: updates find no room on their page and write to the index, or dead rows stay for longer.", s.name,
			strings.Join(differs, ", "))...)
	}
	return found
}

// lookAtBloat checks dead rows.
func (e *examination) lookAtBloat(ctx context.Context, tx pgx.Tx) (found []Finding, err error) {
	tables, err := e.stored(ctx, tx)
	if err != nil {
		return found, err
	}
	var live int64
	for _, s := range tables {
		if live += s.live; s.dead > maxDead+s.live {
			found = append(found, warning("Correct the findings of the checks storage and transactions, and then run as the "+
				"owner of the table:\nVACUUM "+s.name+";",
				"%s has %d dead rows and %d live ones: autovacuum does not keep up.", s.name, s.dead, s.live)...)
		}
	}
	if len(found) == 0 {
		found = ok("The tables have %d rows, and few dead ones.", live)
	}
	return found, nil
}
