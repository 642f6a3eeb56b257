package reserved

import (
	"github.com/jackc/pgx/v5"
)

// column is an array in the row of a reservation, with an element for each bucket.
type column interface {
	collect(buckets []Reserved) any // returns the array
	target() any                    // returns where to scan the array to
	count() int                     // returns how many elements were scanned
	spread(buckets []Reserved)      // sets a field of buckets from the array, which omits default values, and is empty in a row that is older than the column
}

// columns returns the arrays in the order of the statements. No other code knows this order.
func columns() []column {
	return []column{
		of(func(b *Reserved) *string { return &b.Key.Name }),
		of(func(b *Reserved) *string { return &b.Key.Key }),
		of(func(b *Reserved) *float64 { return &b.Cost }),
		of(func(b *Reserved) *float64 { return &b.Capacity }),
		of(func(b *Reserved) *float64 { return &b.Rate }),
		of(func(b *Reserved) *float64 { return &b.Steps }),
		of(func(b *Reserved) *int64 { return &b.StepUs }),
		of(func(b *Reserved) *int64 { return &b.PhaseUs }),
		of(func(b *Reserved) *float64 { return &b.Lowest }),
		mostly(0, func(b *Reserved) *int32 { return &b.Key.Shard }),
		mostly("", func(b *Reserved) *string { return &b.Plan }),
		mostly("", func(b *Reserved) *string { return &b.Calendar }),
		of(func(b *Reserved) *int64 { return &b.PaidUs }),
		mostly(0, func(b *Reserved) *float64 { return &b.Owed }),
	}
}

// array is the column of one field.
type array[T comparable] struct {
	field  func(b *Reserved) *T
	usual  *T // with which the array is empty if all elements have it; nil: it never is
	values []T
}

func of[T comparable](field func(b *Reserved) *T) column { return &array[T]{field: field} }

func mostly[T comparable](usual T, field func(b *Reserved) *T) column {
	return &array[T]{field: field, usual: &usual}
}

func (a *array[T]) collect(buckets []Reserved) any {
	if a.usual != nil && a.isUsual(buckets) {
		return []T{}
	}
	a.values = make([]T, len(buckets))
	for i := range buckets {
		a.values[i] = *a.field(&buckets[i])
	}
	return a.values
}

func (a *array[T]) isUsual(buckets []Reserved) bool {
	for i := range buckets {
		if *a.field(&buckets[i]) != *a.usual {
			return false
		}
	}
	return true
}

func (a *array[T]) target() any { return &a.values }

func (a *array[T]) count() int { return len(a.values) }

func (a *array[T]) spread(buckets []Reserved) {
	for i := range min(len(buckets), len(a.values)) {
		*a.field(&buckets[i]) = a.values[i]
	}
}

// parameters returns the parameters of reservation_save.sql.
func (r *Reservation) parameters() []any {
	arrays := columns()
	all := append(make([]any, 0, 7+len(arrays)), r.ID, r.State, r.ReadyUs, r.StaleUs, r.StartedUs, r.ExpiresUs, r.Release)
	for _, c := range arrays {
		all = append(all, c.collect(r.Buckets))
	}
	return all
}

// scan reads a row of reservation_lock.sql or reservation_free.sql.
func (r *Reservation) scan(row pgx.Row) error {
	arrays := columns()
	targets := []any{&r.State, &r.ReadyUs, &r.StaleUs, &r.StartedUs, &r.ExpiresUs, &r.Release}
	for _, c := range arrays {
		targets = append(targets, c.target())
	}
	if err := row.Scan(targets...); err != nil {
		return err
	}
	r.Buckets = make([]Reserved, arrays[0].count())
	for i := range r.Buckets {
		r.Buckets[i] = Reserved{PaidUs: r.ReadyUs} // the usual, and what held before a column was added
	}
	for _, c := range arrays {
		c.spread(r.Buckets)
	}
	return nil
}
