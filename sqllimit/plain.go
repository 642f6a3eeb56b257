package sqllimit

import (
	"context"
	"database/sql"
	"fmt"
	"reflect"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// runPlain runs statements one after the other through the common interface of all drivers. Parameters are sent as
// text, which the server parses as the types in the statement. Results arrive as the driver's values and are formatted
// as text again. That is lossless, because no two values of float64 have the same shortest text.
func runPlain(ctx context.Context, tx Tx, s statements) (answers []answer) {
	types := pgtype.NewMap()
	for i := 0; i < len(s.queries); i++ {
		if n := plainRun(s.queries[i:]); n > 0 {
			answers = append(answers, execPlain(ctx, tx, joined(s.queries[i:i+n]), nil))
			for range n - 1 {
				answers = append(answers, answers[len(answers)-1])
			}
			i += n - 1
		} else {
			answers = append(answers, onePlain(ctx, tx, types, s.queries[i], s.exec))
		}
		if answers[len(answers)-1].err != nil {
			break
		}
	}
	return answers
}

// plainRun returns how many of the queries at the beginning are savepoints, to be set, undone or released, which go
// together.
func plainRun(queries []*pgx.QueuedQuery) int {
	n := 0
	for n < len(queries) && len(queries[n].Arguments) == 0 && strings.Contains(queries[n].SQL, "SAVEPOINT ") {
		n++
	}
	return n
}

func joined(queries []*pgx.QueuedQuery) string {
	texts := make([]string, len(queries))
	for i, q := range queries {
		texts[i] = q.SQL
	}
	return strings.Join(texts, "; ")
}

func onePlain(ctx context.Context, tx Tx, types *pgtype.Map, q *pgx.QueuedQuery, exec bool) answer {
	parameters := q.Arguments
	if len(parameters) > 0 {
		if _, isMode := parameters[0].(pgx.QueryExecMode); isMode { // which is for pgx
			parameters = parameters[1:]
		}
	}
	arguments := make([]any, len(parameters))
	for i, a := range parameters {
		var err error
		if arguments[i], err = textOf(types, a); err != nil {
			return answer{err: fmt.Errorf("sqllimit: parameter %d: %w", i+1, err)}
		}
	}
	if exec {
		return execPlain(ctx, tx, q.SQL, arguments)
	}
	return queryPlain(ctx, tx, types, q.SQL, arguments)
}

func execPlain(ctx context.Context, tx Tx, query string, arguments []any) answer {
	result, err := tx.ExecContext(ctx, query, arguments...)
	if err != nil {
		return answer{err: err}
	}
	n, err := result.RowsAffected()
	return answer{tag: pgconn.NewCommandTag("UPDATE " + strconv.FormatInt(n, 10)), err: err}
}

func queryPlain(ctx context.Context, tx Tx, types *pgtype.Map, query string, arguments []any) (a answer) {
	rows, err := tx.QueryContext(ctx, query, arguments...)
	if err != nil {
		return answer{err: err}
	}
	defer func() {
		if closeErr := rows.Close(); a.err == nil {
			a.err = closeErr
		}
	}()
	columns, err := rows.ColumnTypes()
	if err != nil {
		return answer{err: err}
	}
	for _, c := range columns {
		field := pgconn.FieldDescription{Name: c.Name(), Format: pgtype.TextFormatCode}
		if t, ok := types.TypeForName(strings.ToLower(c.DatabaseTypeName())); ok {
			field.DataTypeOID = t.OID
		}
		a.fields = append(a.fields, field)
	}
	values, into := make([]any, len(columns)), make([]any, len(columns))
	for i := range values {
		into[i] = &values[i]
	}
	for rows.Next() {
		if err := rows.Scan(into...); err != nil {
			return answer{err: err}
		}
		row, err := textRow(values)
		if err != nil {
			return answer{err: err}
		}
		a.rows = append(a.rows, row)
	}
	a.err = rows.Err()
	return a
}

// textOf returns a parameter as the text that Postgres reads, or nil for null. types knows the type of every parameter
// of the statements.
func textOf(types *pgtype.Map, v any) (any, error) {
	switch v := v.(type) {
	case nil:
		return nil, nil //nolint:nilnil // null
	case string:
		return v, nil
	case pgtype.TextValuer: // the arrays of package store
		t, err := v.TextValue()
		if err != nil || !t.Valid {
			return nil, err
		}
		return t.String, nil
	}
	if t, known := types.TypeForValue(v); known {
		text, err := types.Encode(t.OID, pgtype.TextFormatCode, v, nil)
		if err != nil || text == nil {
			return nil, err
		}
		return string(text), nil
	}
	switch r := reflect.ValueOf(v); r.Kind() { // of a named type
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return strconv.FormatInt(r.Int(), 10), nil
	case reflect.Float64:
		return strconv.FormatFloat(r.Float(), 'g', -1, 64), nil
	case reflect.String:
		return r.String(), nil
	case reflect.Bool:
		return strconv.FormatBool(r.Bool()), nil
	default:
		return nil, fmt.Errorf("a %T has no text", v)
	}
}

// textRow returns what a driver made of the values of a row as their text.
func textRow(values []any) ([][]byte, error) {
	row := make([][]byte, len(values))
	for i, v := range values {
		switch v := v.(type) {
		case nil:
		case []byte:
			row[i] = append([]byte{}, v...)
		case string:
			row[i] = append([]byte{}, v...)
		case int64:
			row[i] = strconv.AppendInt(nil, v, 10)
		case float64:
			row[i] = strconv.AppendFloat(nil, v, 'g', -1, 64)
		case bool:
			row[i] = []byte(map[bool]string{true: "t", false: "f"}[v])
		default:
			return nil, fmt.Errorf("sqllimit: the driver answered with a %T", v)
		}
	}
	return row, nil
}

var _ Tx = (*sql.Conn)(nil)
