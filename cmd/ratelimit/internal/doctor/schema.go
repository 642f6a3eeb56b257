package doctor

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/engine/preflight"
	"github.com/pgratelimit/pgratelimit/migrations"
)

// versionTable is goose's table of applied versions.
const versionTable = "goose_db_version"

// lookAtMigrations compares the existing tables with the tables that this program knows.
func (e *examination) lookAtMigrations(ctx context.Context, tx pgx.Tx) ([]Finding, error) {
	const migrate = "Run ratelimit migrate up, or migrations.Up in a program, as the role that owns the tables."
	want := append(names(knownTables()), versionTable)
	rows, err := tx.Query(ctx, `SELECT c.relname::text, c.relname = 'buckets' AND c.relkind = 'p'
		FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = $1 AND c.relname = ANY ($2::text[])`, e.config.Schema, want)
	if err != nil {
		return nil, err
	}
	var there []string
	var table string
	var isPartitioned, partitioned bool
	_, err = pgx.ForEachRow(rows, []any{&table, &isPartitioned}, func() error {
		there, partitioned = append(there, table), partitioned || isPartitioned
		return nil
	})
	if err != nil {
		return nil, err
	}
	if partitioned {
		return fault(e.unpartition(), "%s is partitioned, and must be one plain table: every call fails, because the "+
			"statements on it crash PostgreSQL 18 in partitions.",
			e.quoted("buckets")), nil
	}
	switch missing := slices.DeleteFunc(want, func(name string) bool { return slices.Contains(there, name) }); {
	case slices.Contains(missing, "buckets") && slices.Contains(missing, versionTable):
		return fault(migrate, "No migration is applied to the schema %q.", e.config.Schema), nil
	case slices.Contains(missing, versionTable):
		return fault(migrate, "The schema %q has tables, but no record of their migrations.", e.config.Schema), nil
	default:
		var version int64
		err := tx.QueryRow(ctx, "SELECT coalesce(max(version_id), 0) FROM "+e.quoted(versionTable)).Scan(&version)
		switch {
		case err != nil:
			return nil, err
		case version < newestVersion:
			return fault(migrate, "The tables are at version %d, and this program needs %d.", version, newestVersion), nil
		case len(missing) > 0:
			return fault("They were dropped: restore them from a backup, or run ratelimit migrate down, which deletes all "+
				"data, and ratelimit migrate up.",
				"The tables are at version %d, and lack %s.", version, strings.Join(missing, ", ")), nil
		}
		found, err := e.lookAtFunctions(ctx, tx)
		switch {
		case version > newestVersion:
			found = append(found, warning("Use the version of this module that migrated the tables, or a newer one.",
				"The tables are at version %d, and this program knows %d: it may be too old for them.", version, newestVersion)...)
		case len(found) == 0:
			found = ok("The tables and functions are at version %d, the newest.", version)
		}
		return found, err
	}
}

// lookAtFunctions compares the functions with those of this program.
func (e *examination) lookAtFunctions(ctx context.Context, tx pgx.Tx) (found []Finding, err error) {
	functions, err := migrations.Functions(migrations.Config{Schema: e.config.Schema})
	if err != nil {
		return nil, err
	}
	for _, f := range functions {
		rows, err := tx.Query(ctx, `SELECT format('%I.%I(%s)', n.nspname, p.proname, oidvectortypes(p.proargtypes)),
				p.prosrc = $3 AND (NOT p.prosecdef OR coalesce(p.proconfig @> '{"search_path=pg_catalog, pg_temp"}', false)), has_function_privilege('public', p.oid, 'EXECUTE'),
				p.prorettype = 'trigger'::regtype
			FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
			WHERE n.nspname = $1 AND p.proname = $2`, e.config.Schema, f.Name, f.Body)
		if err != nil {
			return nil, err
		}
		var signature string
		var same, public, isTrigger bool
		tag, err := pgx.ForEachRow(rows, []any{&signature, &same, &public, &isTrigger}, func() error {
			if !same {
				to := "Run as the owner of the functions, and then ratelimit migrate up and the statements of ratelimit grants; " +
					"calls fail meanwhile:\nDROP FUNCTION " + signature + ";"
				if isTrigger { // it can't be dropped
					to = "Run as the owner of the functions, and then the statements of ratelimit grants:\n" + f.Replace()
				}
				found = append(found, fault(to,
					"The function %s was changed, so it may decide otherwise than this program promises.", f.Name)...)
			}
			if public {
				found = append(found, note("Run as the owner of the functions, and then the statements of ratelimit grants for "+
					"the roles of the programs:\n"+
					"REVOKE EXECUTE ON FUNCTION "+signature+" FROM PUBLIC;",
					"Every role may call the function %s. It needs the privileges on the tables, too.", f.Name)...)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
		if tag.RowsAffected() == 0 {
			found = append(found, fault("Run ratelimit migrate up as the owner of the tables, and then the statements of "+
				"ratelimit grants.",
				"The function %s is missing: calls fail with ErrNotMigrated.", f.Name)...)
		}
	}
	return found, nil
}

// unpartition returns the advice for a table of buckets in partitions.
func (e *examination) unpartition() string {
	var settings []string
	for _, s := range settingsOf("buckets") {
		settings = append(settings, s.name+" = "+s.value)
	}
	return strings.NewReplacer("$buckets", e.quoted("buckets"), "$plain", e.quoted("buckets_plain"), "$settings",
		strings.Join(settings, ", ")).Replace(
		`Run as the owner of the table, and then ratelimit migrate up, and the statements of ratelimit grants again:
BEGIN;
LOCK TABLE $buckets;
CREATE TABLE $plain (LIKE $buckets INCLUDING ALL) WITH ($settings);
INSERT INTO $plain SELECT * FROM $buckets;
DROP TABLE $buckets;
ALTER TABLE $plain RENAME TO buckets;
COMMIT;`)
}

// lookAtHashKey compares the secret of the programs with the fingerprint in the tables.
func (e *examination) lookAtHashKey(ctx context.Context, tx pgx.Tx) ([]Finding, error) {
	var stored string
	err := tx.QueryRow(ctx, "SELECT hash_key FROM "+e.quoted("fingerprint")).Scan(&stored)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return nil, err
	}
	own := preflight.FingerprintOf(e.config.HashKey)
	anew := "; or, to begin anew with full buckets, stop the programs and run as the owner:\nDELETE FROM " +
		e.quoted("fingerprint") + ";"
	switch {
	case stored == "":
		return ok("No program has stored a key yet."), nil
	case stored == own && own == preflight.NoSecret:
		return ok("Keys are stored without a secret."), nil
	case stored == own:
		return ok("Keys are stored under this HashKey."), nil
	case own == preflight.NoSecret:
		return note("Set the secret of the programs: for ratelimit doctor with --hash-key-file or RATELIMIT_HASH_KEY, and "+
			"in a program as HashKey.",
			"Keys are stored under a secret, and none is set here: the secret of the programs was not checked."), nil
	case stored == preflight.NoSecret:
		return fault("Leave Config.HashKey unset, as the other programs do"+anew,
			"Keys are stored without a secret: a program with this HashKey fails with ErrHashKeyMismatch."), nil
	}
	return fault("Set Config.HashKey to the secret of the other programs"+anew,
		"Keys are stored under another secret: a program with this HashKey fails with ErrHashKeyMismatch."), nil
}
