package inspect

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/observe/refusals"
)

// RefusalQuery is which refusals to sum up by the minute.
type RefusalQuery struct {
	// Limit is the limit's name. Empty: all.
	Limit string
	// Key is the key as stored. Nil: all.
	Key *string
	// Since and Until are between which instants the minutes begin: a week at most.
	Since, Until time.Time
	// Shadow selects the refusals of limits in shadow mode.
	Shadow bool
}

// Minute holds the refusals of a minute.
type Minute struct {
	// Begin is when it begins.
	Begin time.Time `json:"begin"`
	// Refused is the number of refusals, and Cost the tokens they requested.
	Refused int64   `json:"refused"`
	Cost    float64 `json:"cost"`
	// Allowed is the number of allowed requests. Only RefusalsByLimit reads it.
	Allowed int64 `json:"-"`
}

// How many rows a query looks at. By key there may be as many groups, which takes longer, and the sums of several
// limits are a part of a page.
const lookRefusals, lookLimits, lookRefusedKeys = 1_000_000, 200_000, 150_000

// Refusals returns the refusals by minute, in order, without empty minutes. It reads at most a million rows, the latest
// minutes first, and for a key of a limit 200,000, but two hours in any case, because the index finds its rows. since
// is the beginning of the minutes that it has read: query.Since or later.
func (r *Reader) Refusals(ctx context.Context, query RefusalQuery) (minutes []Minute, since time.Time, err error) {
	if err := query.check(); err != nil {
		return nil, time.Time{}, err
	}
	since = query.Since
	switch ofKey := query.Limit != "" && query.Key != nil; {
	case !ofKey:
		since, err = r.since(ctx, since, query.Until, r.look.refusals)
	case query.Until.Sub(since) > 2*time.Hour:
		since, err = r.since(ctx, since, query.Until, min(r.look.refusals, lookLimits))
	}
	if err != nil {
		return nil, time.Time{}, err
	}
	minutes, err = collect(ctx, r, "refusals", rowToMinute, r.sql.refusals, since, query.Until, query.Limit, query.Key,
		query.Shadow)
	return minutes, since, err
}

// LimitMinute holds the refusals and the allowed requests of a limit in a minute.
type LimitMinute struct {
	Minute
	// Limit is the limit's name.
	Limit string
	// Shadow is whether the limit was in shadow mode.
	Shadow bool
}

// RefusalsByLimit is Refusals for several limits and keys at once, including refusals in shadow mode and allowed
// requests. Nil limits are all limits, and nil keys all keys. It reads at most 200,000 rows.
func (r *Reader) RefusalsByLimit(ctx context.Context, limits, keys []string, since,
	until time.Time,
) ([]LimitMinute, time.Time, error) {
	for _, limit := range append([]string{""}, limits...) {
		query := RefusalQuery{Limit: limit, Since: since, Until: until}
		if err := query.check(); err != nil {
			return nil, time.Time{}, err
		}
	}
	seen, err := r.since(ctx, since, until, min(r.look.refusals, lookLimits))
	if err != nil {
		return nil, time.Time{}, err
	}
	minutes, err := collect(ctx, r, "refusals by limit", rowToLimitMinute, r.sql.refusalsByLimit, seen, until, limits,
		keys)
	return minutes, seen, err
}

func rowToLimitMinute(row pgx.CollectableRow) (m LimitMinute, err error) {
	err = row.Scan(&m.Limit, &m.Shadow, &m.Begin, &m.Refused, &m.Cost, &m.Allowed)
	m.Begin = m.Begin.UTC()
	return m, err
}

func (q *RefusalQuery) check() error {
	if q.Key != nil {
		if err := checkKey("the key", *q.Key); err != nil {
			return err
		}
	}
	if q.Until.Sub(q.Since) > 7*24*time.Hour {
		return invalid("Since is %v, and Until %v; use a week at most", q.Since, q.Until)
	}
	return checkName(q.Limit)
}

func rowToMinute(row pgx.CollectableRow) (m Minute, err error) {
	err = row.Scan(&m.Begin, &m.Refused, &m.Cost)
	m.Begin = m.Begin.UTC()
	return m, err
}

// TopRefused returns the largest sums of refusals, the largest first. It reads at most a million rows, or 150,000 by
// key, the latest minutes first. since is the beginning of the minutes that it has read: config.Since or later. The
// error wraps ratelimit.ErrInvalidRequest when config cannot be answered.
func (r *Reader) TopRefused(ctx context.Context,
	config refusals.TopConfig,
) (sums []refusals.Sum, since time.Time, err error) {
	look := r.look.refusals
	if config.By == refusals.ByKey {
		look = r.look.refusedKeys
	}
	return r.TopRefusedOf(ctx, config, look)
}

// TopRefusedOf is TopRefused over at most that many rows, for a page that must load fast.
func (r *Reader) TopRefusedOf(ctx context.Context, config refusals.TopConfig,
	look int,
) (sums []refusals.Sum, since time.Time, err error) {
	if err := config.Check(); err != nil {
		return nil, time.Time{}, err
	}
	if config.Since, err = r.since(ctx, config.Since, config.Until, look); err != nil {
		return nil, time.Time{}, err
	}
	sums, err = refusals.Top(ctx, r.db, r.schema, config)
	return sums, config.Since, err
}

// since returns since, or the later instant from which on there are at most that many rows. Of a minute that has more
// by itself all are looked at: a program writes some 11,000.
func (r *Reader) since(ctx context.Context, since, until time.Time, look int) (time.Time, error) {
	var end *time.Time
	if !until.IsZero() {
		end = &until
	}
	later, err := collect(ctx, r, "refusals", pgx.RowTo[time.Time], r.sql.refusalsSince, since, end, look)
	if err != nil || len(later) == 0 {
		return since, err
	}
	return later[0].UTC(), nil
}
