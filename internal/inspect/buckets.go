package inspect

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// Bucket is a stored bucket.
type Bucket struct {
	// Limit is the limit's name, and Key the key as stored: "" of the bucket that everybody shares.
	Limit, Key string
	// Rows are its rows in the order of their shards: one, unless the limit has several, or had another number before.
	Rows []Row
}

// Row is a row of a bucket.
type Row struct {
	// Shard is its number: 0 if it is the only one, and otherwise from n on if there are n.
	Shard int `json:"shard"`
	// Tokens is its value at At. It is negative while tokens are owed.
	Tokens float64 `json:"tokens"`
	// At is when it was last changed, on the database's clock.
	At time.Time `json:"at"`
	// Leases are those on its slots, of a limit that has slots, also such as have ended since At. Only [Reader.Bucket]
	// reads them.
	Leases []Lease `json:"-"`
}

// Lease is a lease on slots of a bucket.
type Lease struct {
	// Fence is its fencing number.
	Fence int64 `json:"fence"`
	// Slots is how many it holds.
	Slots int `json:"slots"`
	// Since is when it was taken, by its fencing token. It was earlier if another lease was taken in the same microsecond,
	// or if the clock had stepped back.
	Since time.Time `json:"since"`
	// Until is when it ends, on the database's clock.
	Until time.Time `json:"until"`
}

// Held returns the leases of the bucket that have not ended at an instant, in the order in which they were taken.
func (b Bucket) Held(at time.Time) (held []Lease) {
	for _, row := range b.Rows {
		for _, lease := range row.Leases {
			if lease.Until.After(at) {
				held = append(held, lease)
			}
		}
	}
	slices.SortFunc(held, func(a, b Lease) int { return cmp.Compare(a.Fence, b.Fence) })
	return held
}

// leasesOf returns the leases in a row's column: the last fencing number, and then number, end and slots of each.
func leasesOf(column []int64) (leases []Lease) {
	for i := 3; i < len(column); i += 3 {
		leases = append(leases, Lease{
			Fence: column[i-2], Since: instant(column[i-2]), Until: instant(column[i-1]),
			Slots: int(column[i]),
		})
	}
	return leases
}

// BucketQuery is which buckets to return, in the order of their keys.
type BucketQuery struct {
	// Limit is the limit's name.
	Limit string
	// Prefix is what the keys begin with, byte for byte. Empty: all.
	Prefix string
	// After is the key of the last bucket of the page before. Nil means the first page.
	After *string
	// Most is how many to return, up to 1000. Defaults to 50.
	Most int
}

const defaultMost, maxMost = 50, 1000

// Limits returns the sorted names of limits that have buckets, after a name. most is 1 to 1000; 0 means 50. A limit
// none of whose buckets has a row is not among them: they are full.
func (r *Reader) Limits(ctx context.Context, after string, most int) (names []string, err error) {
	if err := checkName(after); err != nil {
		return nil, err
	}
	if most, err = checkMost("most", most, defaultMost); err != nil {
		return nil, err
	}
	return collect(ctx, r, "limits", pgx.RowTo[string], r.sql.limits, after, most)
}

// Buckets returns buckets of a limit. A bucket without a row is full, and not among them.
func (r *Reader) Buckets(ctx context.Context, query BucketQuery) ([]Bucket, error) {
	most, err := checkMost("Most", query.Most, defaultMost)
	if err != nil {
		return nil, err
	}
	if err := checkName(query.Limit); err != nil {
		return nil, err
	}
	if err := checkKey("the prefix", query.Prefix); err != nil {
		return nil, err
	}
	from := query.Prefix
	if query.After != nil {
		if err := checkKey("After", *query.After); err != nil {
			return nil, err
		}
		from = max(from, next(*query.After))
	}
	rows, err := collect(ctx, r, "buckets", rowToBucketRow, r.sql.buckets, query.Limit, from, query.Prefix, most)
	return grouped(rows), err
}

// Bucket returns a bucket. It has no Rows when it is full and has none.
func (r *Reader) Bucket(ctx context.Context, limit, key string) (Bucket, error) {
	found, err := r.BucketsAt(ctx, []BucketID{{Limit: limit, Key: key}})
	if err != nil || len(found) == 0 {
		return Bucket{Limit: limit, Key: key}, err
	}
	return found[0], nil
}

// BucketsAt returns those of up to 1000 buckets that have rows, in their order.
func (r *Reader) BucketsAt(ctx context.Context, places []BucketID) ([]Bucket, error) {
	if _, err := checkMost("the number of buckets", len(places), 0); err != nil {
		return nil, err
	}
	limits, keys := make([]string, len(places)), make([]string, len(places))
	for i, p := range places {
		if err := checkBucket(p.Limit, p.Key); err != nil {
			return nil, err
		}
		limits[i], keys[i] = p.Limit, p.Key
	}
	rows, err := collect(ctx, r, "bucket", rowToLeases, r.sql.bucket, limits, keys)
	return grouped(rows), err
}

// bucketRow is a row, and the bucket it is of.
type bucketRow struct {
	limit, key string
	Row
}

func (b *bucketRow) columns(atUs *int64) []any {
	return []any{&b.limit, &b.key, &b.Shard, &b.Tokens, atUs}
}

func rowToBucketRow(row pgx.CollectableRow) (b bucketRow, err error) {
	var atUs int64
	err = row.Scan(b.columns(&atUs)...)
	b.At = instant(atUs)
	return b, err
}

// rowToLeases is rowToBucketRow for a row with its leases.
func rowToLeases(row pgx.CollectableRow) (b bucketRow, err error) {
	var atUs int64
	var leases []int64
	err = row.Scan(append(b.columns(&atUs), &leases)...)
	b.At, b.Leases = instant(atUs), leasesOf(leases)
	return b, err
}

// grouped returns the buckets of rows, which are in their order.
func grouped(rows []bucketRow) (buckets []Bucket) {
	for _, row := range rows {
		if last := len(buckets) - 1; last < 0 || buckets[last].Limit != row.limit || buckets[last].Key != row.key {
			buckets = append(buckets, Bucket{Limit: row.limit, Key: row.key})
		}
		last := &buckets[len(buckets)-1]
		last.Rows = append(last.Rows, row.Row)
	}
	return buckets
}
