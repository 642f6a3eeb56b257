package sqllimit

import (
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/pgratelimit/internal/engine/store"
)

// answer is the complete result of a statement. It is read to its end, because while rows are open, database/sql may
// end their transaction and with it the connection.
type answer struct {
	fields []pgconn.FieldDescription
	rows   [][][]byte // the values of each row as they were sent, in the format that fields say
	tag    pgconn.CommandTag
	err    error
	conn   *pgx.Conn // that they came by; nil: it is none of pgx's
}

// readAnswer reads rows of pgx to their end.
func readAnswer(rows pgx.Rows, err error) answer {
	if err != nil {
		return answer{err: err}
	}
	a := answer{}
	for rows.Next() {
		a.rows = append(a.rows, cloneRow(rows.RawValues()))
	}
	a.fields = slices.Clone(rows.FieldDescriptions())
	rows.Close()
	a.tag, a.err = rows.CommandTag(), rows.Err()
	return a
}

// cloneRow returns a copy of the values of a row, because pgx reuses their memory.
func cloneRow(values [][]byte) [][]byte {
	size := 0
	for _, v := range values {
		size += len(v)
	}
	row, room := make([][]byte, len(values)), make([]byte, 0, size)
	for i, v := range values {
		if v == nil { // null
			continue
		}
		begin := len(room)
		room = append(room, v...)
		row[i] = room[begin:len(room):len(room)]
	}
	return row
}

// memoryRows are an answer as pgx.Rows.
type memoryRows struct {
	answer
	types *pgtype.Map // nil until Scan needs it
	next  int         // of the row after the current one
}

// Close leaves out the rows that were not read.
func (r *memoryRows) Close() { r.next = len(r.rows) + 1 }

// Err returns what went wrong.
func (r *memoryRows) Err() error { return r.err }

// CommandTag returns what the server said.
func (r *memoryRows) CommandTag() pgconn.CommandTag { return r.tag }

// FieldDescriptions returns what the columns are.
func (r *memoryRows) FieldDescriptions() []pgconn.FieldDescription { return r.fields }

// Conn returns the connection of the rows, and nil for another driver. The connection may be in use again, so read only
// its configuration.
func (r *memoryRows) Conn() *pgx.Conn { return r.conn }

// TypeMap returns the map that Scan uses.
func (r *memoryRows) TypeMap() *pgtype.Map {
	if r.types == nil {
		r.types = pgtype.NewMap()
	}
	return r.types
}

// Next goes on to the next row.
func (r *memoryRows) Next() bool {
	r.next = min(r.next+1, len(r.rows)+1)
	return r.next <= len(r.rows) && r.err == nil
}

// RawValues returns the values of the current row.
func (r *memoryRows) RawValues() [][]byte {
	if r.next == 0 || r.next > len(r.rows) {
		return nil
	}
	return r.rows[r.next-1]
}

// Scan reads the current row.
func (r *memoryRows) Scan(into ...any) error {
	values := r.RawValues()
	if len(into) == 1 {
		if scanner, ok := into[0].(pgx.RowScanner); ok {
			return scanner.ScanRow(r)
		}
	}
	if len(values) != len(into) || len(values) != len(r.fields) {
		return r.failed(fmt.Errorf("sqllimit: %d columns to scan into %d variables", len(values), len(into)))
	}
	for i, to := range into {
		if to == nil {
			continue
		}
		if err := r.TypeMap().Scan(r.fields[i].DataTypeOID, r.fields[i].Format, values[i], to); err != nil {
			return r.failed(fmt.Errorf("sqllimit: column %s: %w", r.fields[i].Name, err))
		}
	}
	return nil
}

func (r *memoryRows) failed(err error) error {
	r.err = err
	r.Close()
	return err
}

// Values returns the current row decoded.
func (r *memoryRows) Values() ([]any, error) {
	raw := r.RawValues()
	values := make([]any, len(raw))
	for i := range raw {
		if err := r.TypeMap().Scan(r.fields[i].DataTypeOID, r.fields[i].Format, raw[i], &values[i]); err != nil {
			return nil, err
		}
	}
	return values, nil
}

// memoryResults are answers as pgx.BatchResults.
type memoryResults struct {
	queries []*pgx.QueuedQuery
	answers []answer // up to the first that failed
	err     error    // of the batch as a whole
	next    int
	closed  bool
}

var errNoMoreResults = errors.New("sqllimit: the batch has no more results")

// Query returns the answer to the next statement.
func (r *memoryResults) Query() (pgx.Rows, error) {
	a := answer{err: errNoMoreResults}
	if r.err != nil {
		a.err = r.err
	}
	if !r.closed && r.next < len(r.answers) {
		a = r.answers[r.next]
		r.next++
	}
	if a.err != nil && r.err == nil {
		r.err = a.err
	}
	return &memoryRows{answer: a}, a.err
}

// Exec returns what the server said to the next statement.
func (r *memoryResults) Exec() (pgconn.CommandTag, error) {
	rows, err := r.Query()
	return rows.CommandTag(), err
}

// QueryRow returns the first row that the next statement answered with.
func (r *memoryResults) QueryRow() pgx.Row {
	rows, err := r.Query()
	return store.RowOf(rows, err)
}

// Close returns the first error, of statements that were not asked for, too.
func (r *memoryResults) Close() error {
	for !r.closed && r.err == nil && r.next < len(r.answers) {
		var err error
		if q := r.queries[r.next]; q.Fn != nil {
			err = q.Fn(r)
		} else {
			_, err = r.Exec()
		}
		if r.err == nil {
			r.err = err
		}
	}
	r.closed = true
	return r.err
}

// Tx returns nil: the batch began no transaction.
func (r *memoryResults) Tx() pgx.Tx { return nil }
