package store

import (
	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// ScanWithParts reads a row into columns, and returns its parts, or nil if it has none. The two columns from parts on,
// taken and leases, must be nil. It does not scan null arrays, because pgx allocates for them, too.
func ScanWithParts(row pgx.CollectableRow, columns []any, parts int) (*bucket.Parts, error) {
	if raw := row.RawValues(); len(raw) != len(columns) || raw[parts] == nil && raw[parts+1] == nil {
		return nil, row.Scan(columns...) // which returns an error if the number differs
	}
	read := &bucket.Parts{}
	columns[parts], columns[parts+1] = &read.Taken, &read.Leases
	err := row.Scan(columns...)
	columns[parts], columns[parts+1] = nil, nil
	return read, err
}
