package inspect

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// UsedQuery selects the most used buckets.
type UsedQuery struct {
	// Limit is the limit's name. Empty: all.
	Limit string
	// Since is the earliest last change of a bucket.
	Since time.Time
	// Look is how many rows to read, and Most how many buckets to return.
	Look, Most int
}

// Used returns the buckets of which the largest part was used at their last change, among the first rows that it looks
// at. isCut reports whether there may be others.
func (r *Reader) Used(ctx context.Context, query UsedQuery) (found []Bucket, isCut bool, err error) {
	if err := checkName(query.Limit); err != nil {
		return nil, false, err
	}
	var places []BucketID
	_, err = collect(ctx, r, "used", func(row pgx.CollectableRow) (n int, err error) {
		var p BucketID
		err = row.Scan(&p.Limit, &p.Key, &n)
		places, isCut = append(places, p), n == query.Look
		return n, err
	}, r.sql.used, query.Limit, query.Since.UnixMicro(), query.Look, query.Most)
	if err != nil || len(places) == 0 {
		return nil, false, err
	}
	found, err = r.BucketsAt(ctx, places)
	return found, isCut, err
}
