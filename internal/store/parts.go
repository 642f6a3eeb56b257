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
func statesAsColumns(states []bucket.State) (values array[double], ts array[bigint], capacities array[double], taken, leased []*string) {
	hasParts := false
	for _, s := range states {
		values, ts, capacities = append(values, double(s.Value)), append(ts, bigint(s.TS)), append(capacities, double(s.Capacity))
		hasParts = hasParts || s.Parts != nil
	}
	if !hasParts {
		return values, ts, capacities, nil, nil
	}
	taken, leased = make([]*string, len(states)), make([]*string, len(states))
	for i, s := range states {
		if s.Parts == nil {
			continue
		}
		taken[i] = arrayLiteral(s.Parts.Taken, func(b []byte, tokens float64) []byte { return strconv.AppendFloat(b, tokens, 'g', -1, 64) })
		leased[i] = arrayLiteral(leasedOf(s), func(b []byte, n int64) []byte { return strconv.AppendInt(b, n, 10) })
	}
	return values, ts, capacities, taken, leased
}

// leasedOf returns what the row of a bucket has of its leases.
func leasedOf(s bucket.State) (leased []int64) {
	if fence := s.LastFence(); fence != nil {
		leased = append(leased, *fence)
	}
	if first, last := s.Ends(); first != nil {
		leased = append(leased, *first, *last)
	}
	return leased
}

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
