package doctor

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/jackc/pgx/v5"
)

// index is one that the migrations make.
type index struct {
	columns   string // separated by ", "
	unique    bool   // it is the primary key
	statement string // that makes it, for the default schema
}

// lookAtIndexes looks whether the tables have the indexes that the migrations made, which a restore in part leaves out.
func (e *examination) lookAtIndexes(ctx context.Context, tx pgx.Tx) (found []Finding, err error) {
	there, err := e.indexes(ctx, tx)
	if err != nil {
		return found, err
	}
	for _, table := range slices.Sorted(maps.Keys(there)) {
		for _, want := range e.tables.indexes[table] {
			if slices.ContainsFunc(there[table], func(is index) bool { return is.columns == want.columns && (is.unique || !want.unique) }) {
				continue
			}
			f := Finding{
				Level: Warning, Says: fmt.Sprintf("%s has no index of %s: what looks there reads the whole table.", e.quoted(table), want.columns),
				Do: "Run as the owner of the table; it lets nobody write meanwhile:\n" + e.inSchema(want.statement),
			}
			if want.unique {
				f.Level = Fault
				f.Says = fmt.Sprintf("%s has no primary key, or none that is valid: what writes to it fails.", e.quoted(table))
			}
			found = append(found, f)
		}
	}
	if len(found) == 0 {
		found = ok("The tables have their indexes.")
	}
	return found, nil
}

// indexes returns the indexes of the tables that there are, without those that are not valid.
func (e *examination) indexes(ctx context.Context, tx pgx.Tx) (map[string][]index, error) {
	rows, err := tx.Query(ctx, `
		SELECT c.relname::text, coalesce(i.indisunique AND i.indimmediate AND i.indpred IS NULL, false), coalesce((
				SELECT string_agg(a.attname::text, ', ' ORDER BY k.position)
				FROM unnest(i.indkey::smallint[]) WITH ORDINALITY AS k (attribute, position)
				JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.attribute
			), '')
		FROM pg_catalog.pg_class c
		JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		LEFT JOIN pg_catalog.pg_index i ON i.indrelid = c.oid AND i.indisvalid
		WHERE n.nspname = $1 AND c.relname = ANY ($2::text[])`, e.config.Schema, slices.Sorted(maps.Keys(e.tables.indexes)))
	if err != nil {
		return nil, err
	}
	there := make(map[string][]index)
	var table string
	var is index
	_, err = pgx.ForEachRow(rows, []any{&table, &is.unique, &is.columns}, func() error {
		there[table] = append(there[table], is)
		return nil
	})
	return there, err
}

// quoted returns the name of a table as a statement has it.
func (e *examination) quoted(table string) string {
	return pgx.Identifier{e.config.Schema, table}.Sanitize()
}
