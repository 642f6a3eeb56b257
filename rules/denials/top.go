package denials

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// By is what the refusals are summed up by.
type By string

const (
	// ByLimit sums up by limit. It is what the empty By means.
	ByLimit By = "limit"
	// ByRoute sums up by limit and route.
	ByRoute By = "route"
	// ByKey sums up by limit and key.
	ByKey By = "key"
)

const defaultMost, maxMost = 10, 1000

// TopConfig is what Top asks for. The zero TopConfig asks for the ten limits that refused most.
type TopConfig struct {
	// Since and Until are between which instants the minutes begin that count; the latter does not. The zero time is no
	// bound.
	Since, Until time.Time
	// By is what is summed up by. Defaults to ByLimit.
	By By
	// Limit is the name of the only limit that counts. Defaults to "", every limit.
	Limit string
	// Shadow asks for the refusals that turned nobody away, as the limit was only tried, in place of those that did.
	Shadow bool
	// Most is how many sums are returned, 1,000 at most. Defaults to 10.
	Most int
}

// Sum is what was refused.
type Sum struct {
	// Limit is the limit's name.
	Limit string
	// Route is the route, by ByRoute.
	Route string
	// Key is the key as stored, by ByKey. It is empty for what is not told apart: refusals of [ratelimit.Limit.Global],
	// of keys that were not among the heaviest, and of the minute that is not over.
	Key string
	// Refused is how often. Of a key it may be less than the truth, and is never more.
	Refused int64
	// Cost is what was asked for, in tokens.
	Cost float64
	// Last is the instant of the latest.
	Last time.Time
}

// Check returns an error that wraps ratelimit.ErrInvalidRequest when Top cannot answer the TopConfig.
func (c *TopConfig) Check() error {
	switch c.By {
	case "", ByLimit, ByRoute, ByKey:
	default:
		return fmt.Errorf("%w: denials: By is %.20q; use limit, route or key", ratelimit.ErrInvalidRequest, string(c.By))
	}
	if c.Most < 0 || c.Most > maxMost {
		return fmt.Errorf("%w: denials: Most is %d; use 1 to %d, or 0 for %d", ratelimit.ErrInvalidRequest, c.Most, maxMost, defaultMost)
	}
	return nil
}

// Top returns what was refused most, the most first, as far as it is written. It reads all rows of the minutes asked for.
// The error wraps ratelimit.ErrInvalidRequest when config cannot be answered.
func (c *Counter) Top(ctx context.Context, config TopConfig) ([]Sum, error) {
	return Top(ctx, c.pool, c.config.Schema, config)
}

// DB is what Top reads from: a pool, a connection or a transaction.
type DB interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Top is [Counter.Top] for who counts nothing, such as a page. schema is that of the table; "" is "ratelimit". The error
// wraps ratelimit.ErrInvalidConfig when it is no name of a schema.
func Top(ctx context.Context, db DB, schema string, config TopConfig) ([]Sum, error) {
	schema, err := schemaOf(schema)
	if err != nil {
		return nil, err
	}
	if err := config.Check(); err != nil {
		return nil, err
	}
	if config.Until.IsZero() {
		config.Until = time.Date(9999, time.December, 31, 0, 0, 0, 0, time.UTC)
	}
	// Planned each time, for these minutes: a plan for any takes them for few rows, and sorts what it should hash.
	rows, err := db.Query(ctx, newStatements(schema).top, pgx.QueryExecModeExec, config.Since, config.Until, config.By == ByRoute, config.By == ByKey,
		clean(config.Limit, maxNameBytes+1), config.Shadow, cmp.Or(config.Most, defaultMost))
	if err != nil {
		return nil, fmt.Errorf("denials: top: %w", explain(err, schema))
	}
	sums, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (s Sum, err error) {
		var lastUs int64
		err = row.Scan(&s.Limit, &s.Route, &s.Key, &s.Refused, &s.Cost, &lastUs)
		s.Last = time.UnixMicro(lastUs)
		return s, err
	})
	if err != nil {
		return nil, fmt.Errorf("denials: top: %w", explain(err, schema))
	}
	return sums, nil
}

// pruneRows is how many rows a statement deletes at most.
const pruneRows = 10_000

// Prune deletes the rows of minutes that began before an instant, the oldest first, and returns how many it deleted. It
// works in small transactions, waits for no row, and leaves what another process is deleting to that. On an error what it
// has deleted stays deleted. Call it every hour or day.
func (c *Counter) Prune(ctx context.Context, before time.Time) (deleted int64, err error) {
	for {
		tag, err := c.pool.Exec(ctx, c.sql.prune, before, pruneRows)
		deleted += tag.RowsAffected()
		if err != nil {
			return deleted, fmt.Errorf("denials: prune: %w", explain(err, c.config.Schema))
		}
		if tag.RowsAffected() < pruneRows {
			return deleted, nil
		}
	}
}
