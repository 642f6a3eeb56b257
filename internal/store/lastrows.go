package store

import "github.com/jackc/pgx/v5"

// QueryLast returns the rows of the last statement of a batch, which end it.
func QueryLast(results pgx.BatchResults) (pgx.Rows, error) {
	rows, err := results.Query()
	if err != nil {
		_ = results.Close() // with the same error
		return nil, err
	}
	return &lastRows{Rows: rows, results: results}, nil
}

// lastRows are rows that end a batch.
type lastRows struct {
	pgx.Rows
	results pgx.BatchResults
	err     error
}

// Next reads the next row.
func (r *lastRows) Next() bool {
	if r.Rows.Next() {
		return true
	}
	r.Close()
	return false
}

// Close ends the batch.
func (r *lastRows) Close() {
	r.Rows.Close()
	if err := r.results.Close(); r.err == nil {
		r.err = err
	}
}

// Err returns what went wrong.
func (r *lastRows) Err() error {
	if err := r.Rows.Err(); err != nil {
		return err
	}
	return r.err
}
