package store

import (
	"strconv"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// ScanWithParts reads a row into columns, and returns its parts, or nil if it has none. The two columns from parts on, taken and
// leases, must be nil. It does not scan null arrays, because pgx allocates for them, too.
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

// statesAsColumns returns states as the array parameters of a statement. An array in each row is the literal of one: arrays of
// arrays must all have one length.
func statesAsColumns(states []bucket.State) (values array[double], ts array[bigint], capacities array[double], taken []*string, of leaseColumns) {
	hasParts := false
	for _, s := range states {
		values, ts, capacities = append(values, double(s.Value)), append(ts, bigint(s.TS)), append(capacities, double(s.Capacity))
		hasParts = hasParts || s.Parts != nil
	}
	if !hasParts {
		return values, ts, capacities, nil, of
	}
	taken = make([]*string, len(states))
	of = leaseColumns{make([]*int64, len(states)), make([]*int64, len(states)), make([]*int64, len(states))}
	for i, s := range states {
		if s.Parts == nil {
			continue
		}
		taken[i] = arrayLiteral(s.Parts.Taken, func(b []byte, tokens float64) []byte { return strconv.AppendFloat(b, tokens, 'g', -1, 64) })
		of.fences[i] = s.LastFence()
		of.firsts[i], of.lasts[i] = s.Ends()
	}
	return values, ts, capacities, taken, of
}

// leaseColumns are what the rows of buckets have of their leases.
type leaseColumns struct{ fences, firsts, lasts []*int64 }

// arrayLiteral returns the literal of an array of numbers, and nil for none.
func arrayLiteral[T any](numbers []T, appendTo func(b []byte, n T) []byte) *string {
	if numbers == nil {
		return nil
	}
	b := []byte{'{'}
	for i, n := range numbers {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendTo(b, n)
	}
	literal := string(append(b, '}'))
	return &literal
}
