package migrations

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/pressly/goose/v3/database"
)

// directive matches the comments that only goose reads.
var directive = regexp.MustCompile(`(?m)^-- \+goose .*\n`)

// SQL returns the statements that Up sends to an empty database, in order, for other migration tools. It needs no
// database. The statements record their versions as Up does, for Up, Version and ratelimit doctor. After an update of
// this module, apply the new files of [FS]. An existing schema is not changed.
func SQL(cfg Config) (string, error) {
	schema, err := cfg.schema()
	if err != nil {
		return "", err
	}
	create, err := versionTableSQL(schema)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	fmt.Fprintf(&b, "CREATE SCHEMA IF NOT EXISTS %s;\n\n%s;\n", pgx.Identifier{schema}.Sanitize(),
		strings.TrimSpace(create))
	record := "INSERT INTO " + pgx.Identifier{schema, versionTable}.Sanitize() + " (version_id, is_applied) VALUES"
	fmt.Fprintf(&b, "%s (0, true);\n", record)
	files := schemaFS{FS, schema}
	names, err := fs.Glob(files, "*.sql")
	if err != nil {
		return "", err
	}
	for _, name := range names {
		up, err := upOf(files, name)
		if err != nil {
			return "", err
		}
		version, err := versionOf(name)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(&b, "\n-- %s\n%s\n%s (%d, true);\n", name, strings.TrimSpace(directive.ReplaceAllString(up, "")), record,
			version)
	}
	return b.String(), nil
}

// versionOf returns the version of a file: the number at the start of its name.
func versionOf(name string) (version int64, err error) {
	_, err = fmt.Sscanf(name, "%d_", &version)
	return version, err
}

// versionTableSQL returns the statement with which goose creates its table of versions.
func versionTableSQL(schema string) (string, error) {
	store, err := newStore(schema)
	if err != nil {
		return "", err
	}
	var r recorder
	err = store.Store.CreateVersionTable(context.Background(), &r)
	return r.said, err
}

// recorder keeps the statement that goose sends.
type recorder struct {
	database.DBTxConn
	said string
}

var errSecond = errors.New("goose creates its table with more than one statement")

func (r *recorder) ExecContext(_ context.Context, statement string, args ...any) (sql.Result, error) {
	if r.said != "" || len(args) > 0 {
		return nil, errSecond
	}
	r.said = statement
	return nil, nil //nolint:nilnil // goose ignores the result
}
