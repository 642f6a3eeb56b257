package migrations

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Function is a function of the schema. A migration creates it, and no later one changes it.
type Function struct {
	// Name is without the schema. No two functions have the same name.
	Name string
	// Body is the text between the dollar quotes, as in prosrc of pg_proc.
	Body string

	create string // the statements that its migration makes it with
}

// Replace returns the statement that gives the function its body back, also while triggers depend on it.
func (f *Function) Replace() string {
	statement, _, _ := strings.Cut(f.create, f.Body+"$$")
	return strings.Replace(strings.TrimSpace(statement), "CREATE", "CREATE OR REPLACE", 1) + f.Body + "$$;"
}

var createFunction = regexp.MustCompile(`(?s)\nCREATE FUNCTION [^(]+\.([a-z0-9_]+)\(.*?\sAS \$\$(.*?)\$\$`)

// Functions returns the newest migration's functions, for example to compare them with a database's. It sends no
// statement. It returns [ErrInvalidSchema].
func Functions(cfg Config) ([]Function, error) {
	schema, err := cfg.schema()
	if err != nil {
		return nil, err
	}
	files := schemaFS{FS, schema}
	names, err := fs.Glob(files, "*.sql")
	if err != nil {
		return nil, err
	}
	var functions []Function
	for _, name := range names {
		up, err := upOf(files, name)
		if err != nil {
			return nil, err
		}
		all := createFunction.FindAllStringSubmatchIndex(up, -1)
		for i, at := range all {
			end := len(up)
			if i+1 < len(all) {
				end = all[i+1][0]
			}
			functions = append(functions, Function{Name: up[at[2]:at[3]], Body: up[at[4]:at[5]], create: up[at[0]:end]})
		}
	}
	return functions, nil
}

// upOf returns the statements of a file that apply it.
func upOf(files fs.FS, name string) (string, error) {
	content, err := fs.ReadFile(files, name)
	up, _, _ := strings.Cut(string(content), "-- +goose Down")
	return up, err
}

// MissingFunctions returns the functions that a migrated schema has lost, as in a dump restored without them. [Up] makes
// them again.
func MissingFunctions(ctx context.Context, db querier, cfg Config) ([]Function, error) {
	functions, err := Functions(cfg)
	if err != nil {
		return nil, err
	}
	var there []string
	const query = `SELECT coalesce(array_agg(p.proname::text), '{}') FROM pg_catalog.pg_proc AS p
		JOIN pg_catalog.pg_namespace AS n ON n.oid = p.pronamespace WHERE n.nspname = $1`
	if err := db.QueryRow(ctx, query, cmp.Or(cfg.Schema, DefaultSchema)).Scan(&there); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(functions, func(f Function) bool { return slices.Contains(there, f.Name) }), nil
}

// makeFunctions creates functions with the privileges that their migrations give them.
func makeFunctions(ctx context.Context, tx pgx.Tx, functions []Function) error {
	for _, f := range functions {
		if _, err := tx.Exec(ctx, f.create); err != nil {
			return fmt.Errorf("create the function %s again: %w", f.Name, err)
		}
	}
	return nil
}
