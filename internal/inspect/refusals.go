package inspect

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/rules/denials"
)

// RefusalQuery is which refusals to sum up by the minute.
type RefusalQuery struct {
	// Limit is the limit's name. Empty: all.
	Limit string
	// Key is the key as stored. Nil: all.
	Key *string
	// Since and Until are between which instants the minutes begin: a day at most.
	Since, Until time.Time
	// Shadow asks for those that turned nobody away.
	Shadow bool
}

// Minute is what was refused in a minute.
type Minute struct {
	// Begin is when it begins.
	Begin time.Time
	// Refused is how often, and Cost what was asked for, in tokens.
	Refused int64
	Cost    float64
}

// lookRefusals is how many rows of refusals a query looks at.
const lookRefusals = 1_000_000

// Refusals returns what was refused, by the minute, in their order. Minutes in which nothing was are left out. It looks at a
// million rows at most, the latest minutes first: since is from when on, query.Since or later.
func (r *Reader) Refusals(ctx context.Context, query RefusalQuery) (minutes []Minute, since time.Time, err error) {
	if err := query.check(); err != nil {
		return nil, time.Time{}, err
	}
	minutes, err = collect(ctx, r, "refusals", rowToMinute, r.sql.refusals, query.Since, query.Until, query.Limit, query.Key, query.Shadow)
	return minutes, query.Since, err
}

func (q *RefusalQuery) check() error {
	if q.Key != nil {
		if err := checkKey("the key", *q.Key); err != nil {
			return err
		}
	}
	if q.Until.Sub(q.Since) > 24*time.Hour {
		return invalid("Since is %v, and Until %v; use a day at most", q.Since, q.Until)
	}
	return checkName(q.Limit)
}

func rowToMinute(row pgx.CollectableRow) (m Minute, err error) {
	err = row.Scan(&m.Begin, &m.Refused, &m.Cost)
	m.Begin = m.Begin.UTC()
	return m, err
}

// TopRefused returns what was refused most, the most first. It looks at a million rows at most, the latest minutes first:
// since is from when on, config.Since or later.
func (r *Reader) TopRefused(ctx context.Context, config denials.TopConfig) (sums []denials.Sum, since time.Time, err error) {
	return denials.Top(ctx, r.db, r.schema, config)
}
