package inspect

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"
)

// OwingQuery is where to look for buckets that owe tokens.
type OwingQuery struct {
	// Limit is the limit's name. Empty: all limits.
	Limit string
	// After is where the search before ended. Nil: at the beginning.
	After *Position
	// Look is how many rows to look at, up to 1,000,000. Defaults to 100,000.
	Look int
	// Most is how many buckets to return, up to 10,000. Defaults to 1000.
	Most int
}

// Position is a place in the order of buckets.
type Position struct {
	// Limit and Key name the bucket.
	Limit, Key string
}

// Owing is the result of a search for buckets that owe tokens.
type Owing struct {
	// Buckets had a negative value at their last change, in one of their rows at least. They are in the order of their
	// limits and keys. How many tokens have arrived since depends on the policy: project each bucket to now.
	Buckets []Bucket
	// Next is where the next search continues. Nil: everything was looked at.
	Next *Position
}

const (
	defaultLook, maxLook   = 100_000, 1_000_000
	defaultOwing, maxOwing = 1000, 10_000
)

// Owing searches for buckets that owe tokens. It ends after Look rows, or when it has found Most buckets. There may be
// fewer, and none, although there are more: see [Owing.Next].
func (r *Reader) Owing(ctx context.Context, query OwingQuery) (Owing, error) {
	look, err := checkMost("Look", query.Look, defaultLook, maxLook)
	if err != nil {
		return Owing{}, err
	}
	most, err := checkMost("Most", query.Most, defaultOwing, maxOwing)
	if err != nil {
		return Owing{}, err
	}
	from, err := query.from()
	if err != nil {
		return Owing{}, err
	}
	sql := r.sql.owing
	if query.Limit != "" {
		sql = r.sql.owingOfLimit
	}
	rows, err := collect(ctx, r, "owed", rowToOwing, sql, from.Limit, from.Key, look, most+1)
	if err != nil || len(rows) == 0 {
		return Owing{}, err
	}
	isCut := rows[len(rows)-1].n == look
	if len(rows) > most {
		rows, isCut = rows[:most], true
	}
	found := make([]bucketRow, len(rows))
	for i := range rows {
		found[i] = rows[i].bucketRow
	}
	owing := Owing{Buckets: grouped(found)}
	if !isCut {
		return owing, nil
	}
	err = r.complete(ctx, &owing)
	return owing, err
}

// complete reads all rows of the last bucket, at which a search ended, and leaves it out if it owes nothing.
func (r *Reader) complete(ctx context.Context, owing *Owing) error {
	last := &owing.Buckets[len(owing.Buckets)-1]
	owing.Next = &Position{Limit: last.Limit, Key: last.Key}
	var err error
	if *last, err = r.Bucket(ctx, last.Limit, last.Key); err != nil {
		return err
	}
	if !slices.ContainsFunc(last.Rows, func(row Row) bool { return row.Tokens < 0 }) {
		owing.Buckets = owing.Buckets[:len(owing.Buckets)-1]
	}
	return nil
}

// from returns where the search begins.
func (q *OwingQuery) from() (Position, error) {
	if err := checkName(q.Limit); err != nil {
		return Position{}, err
	}
	if q.After == nil {
		return Position{Limit: q.Limit}, nil
	}
	if err := checkText("the limit of After", q.After.Limit, maxNameBytes); err != nil {
		return Position{}, err
	}
	if err := checkKey("the key of After", q.After.Key); err != nil {
		return Position{}, err
	}
	if q.Limit != "" && q.After.Limit != q.Limit {
		return Position{}, invalid("After is of limit %q, and the search of %q; use the Next of a search of that limit",
			q.After.Limit, q.Limit)
	}
	return Position{Limit: q.After.Limit, Key: next(q.After.Key)}, nil
}

// owingRow is a row of a bucket that owes, or the last that was looked at.
type owingRow struct {
	bucketRow
	n int // how many were looked at
}

func rowToOwing(row pgx.CollectableRow) (d owingRow, err error) {
	var atUs int64
	err = row.Scan(append(d.columns(&atUs), &d.n)...)
	d.At = instant(atUs)
	return d, err
}
