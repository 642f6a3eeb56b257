package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/gate"
)

// versionTable is where goose keeps what is applied.
const versionTable = "goose_db_version"

// lookAtMigrations compares the tables that there are with those that this program knows.
func (e *examination) lookAtMigrations(ctx context.Context, tx pgx.Tx) (found []Finding, err error) {
	const migrate = "Run ratelimit migrate up, or migrations.Up in a program, as the role that owns the tables."
	missing, err := e.missingTables(ctx, tx)
	if err != nil {
		return found, err
	}
	if slices.Contains(missing, versionTable) {
		says := fmt.Sprintf("No migration is applied to the schema %q.", e.config.Schema)
		if !slices.Contains(missing, "buckets") {
			says = fmt.Sprintf("The schema %q has tables, and no record of the migrations that made them.", e.config.Schema)
		}
		found = []Finding{{Level: Fault, Says: says, Do: migrate}}
		return found, nil
	}
	var version int64
	table := pgx.Identifier{e.config.Schema, versionTable}.Sanitize()
	if err := tx.QueryRow(ctx, "SELECT coalesce(max(version_id), 0) FROM "+table).Scan(&version); err != nil {
		return found, err
	}
	known := e.tables.version
	switch {
	case version < known:
		found = []Finding{{Level: Fault, Says: fmt.Sprintf("The tables are at version %d, and this program needs %d.", version, known), Do: migrate}}
	case len(missing) > 0:
		found = []Finding{{
			Level: Fault, Says: fmt.Sprintf("The tables are at version %d, and lack %s.", version, strings.Join(missing, ", ")),
			Do: "Somebody has dropped them: take them from a backup, or run ratelimit migrate down, which forgets everything, and ratelimit migrate up.",
		}}
	case version > known:
		found = []Finding{{
			Level: Warning, Says: fmt.Sprintf("The tables are at version %d, and this program knows %d: it may be older than they allow.", version, known),
			Do: "Use the version of this module that migrated the tables, or a newer one.",
		}}
	default:
		found = ok("The tables are at version %d, the newest.", version)
	}
	return found, nil
}

// missingTables returns the tables that are not there.
func (e *examination) missingTables(ctx context.Context, tx pgx.Tx) ([]string, error) {
	grants, err := grantsFor(e.config.Schema, "app")
	if err != nil {
		return nil, err
	}
	rows, err := tx.Query(ctx, `SELECT c.relname::text FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = $1 AND c.relname = ANY ($2::text[])`, e.config.Schema, tableNames(grants))
	if err != nil {
		return nil, err
	}
	there, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(tableNames(grants), func(name string) bool { return slices.Contains(there, name) }), nil
}

// lookAtHashKey compares the secret of the programs with the one under which keys are stored.
func (e *examination) lookAtHashKey(ctx context.Context, tx pgx.Tx) (found []Finding, err error) {
	table := pgx.Identifier{e.config.Schema, "fingerprint"}.Sanitize()
	var stored string
	err = tx.QueryRow(ctx, "SELECT hash_key FROM "+table).Scan(&stored)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return found, err
	}
	own, anew := gate.FingerprintOf(e.config.HashKey), "; or, to begin anew with full buckets, stop the programs and run as the owner:\nDELETE FROM "+table+";"
	switch {
	case stored == "":
		found = ok("No program has stored a key yet.")
	case stored == own && own == gate.NoSecret:
		found = ok("Keys are stored as they are.")
	case stored == own:
		found = ok("Keys are stored under this HashKey.")
	case own == gate.NoSecret:
		found = []Finding{{
			Level: Note, Says: "Keys are stored under a secret, and none was given here: whether the programs have the right one was not looked at.",
			Do: "Give the secret of the programs: with --hash-key-file or RATELIMIT_HASH_KEY to ratelimit doctor, as HashKey in a program.",
		}}
	case stored == gate.NoSecret:
		found = []Finding{{
			Level: Fault, Says: "Keys are stored as they are, without a secret: a program with this HashKey fails with ErrHashKeyMismatch.",
			Do: "Leave Config.HashKey unset, as the other programs do" + anew,
		}}
	default:
		found = []Finding{{
			Level: Fault, Says: "Keys are stored under another secret: a program with this HashKey fails with ErrHashKeyMismatch.",
			Do: "Set Config.HashKey to the one that the other programs have" + anew,
		}}
	}
	return found, nil
}
