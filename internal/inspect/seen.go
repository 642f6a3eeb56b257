package inspect

import (
	"context"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// Seen is the plan of a key, as the last refusal or reservation of a bucket tells it. No other table has it.
type Seen struct {
	Limit string `json:"limit"`
	Key   string `json:"key"`
	// Plan is the plan, "" for none, and At when it was seen.
	Plan string    `json:"plan"`
	At   time.Time `json:"at"`
}

// SeenQuery selects buckets, and the time of their refusals.
type SeenQuery struct {
	// Limit is the limit's name. Empty: all.
	Limit string
	// Keys are keys as stored. Of the shared bucket no plan is known.
	Keys []string
	// Since and Until are between which instants the minutes of refusals begin: a week at most.
	Since, Until time.Time
}

// BucketID names a bucket.
type BucketID struct{ Limit, Key string }

// Seen returns the plans of keys, as far as they are known. It reads at most 200,000 rows of refusals, the latest
// first, and the 25,000 reservations that end last.
func (r *Reader) Seen(ctx context.Context, query SeenQuery) (map[BucketID]*Seen, error) {
	for i := range query.Keys {
		check := RefusalQuery{Limit: query.Limit, Key: &query.Keys[i], Since: query.Since, Until: query.Until}
		if err := check.check(); err != nil {
			return nil, err
		}
	}
	since, err := r.since(ctx, query.Since, query.Until, min(r.look.refusals, lookLimits))
	if err != nil {
		return nil, err
	}
	rows, err := collect(ctx, r, "plans", rowToSeen, r.sql.seen, query.Limit, query.Keys, since, query.Until,
		r.look.reservations)
	seen := make(map[BucketID]*Seen, len(rows))
	for _, s := range rows {
		if other := seen[BucketID{s.Limit, s.Key}]; other != nil && other.At.After(s.At) {
			continue
		}
		seen[BucketID{s.Limit, s.Key}] = &s
	}
	return seen, err
}

func rowToSeen(row pgx.CollectableRow) (s Seen, err error) {
	var atUs int64
	var rule string
	err = row.Scan(&s.Limit, &s.Key, &rule, &atUs)
	s.Plan, s.At = strings.TrimPrefix(strings.TrimPrefix(rule, s.Limit), ", plan "), instant(atUs)
	return s, err
}
