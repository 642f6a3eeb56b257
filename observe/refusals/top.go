package refusals

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/internal/pgerr"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// By says how Top groups refusals.
type By string

const (
	// ByLimit groups by limit. The empty By means ByLimit.
	ByLimit By = "limit"
	// ByRoute groups by limit and route.
	ByRoute By = "route"
	// ByKey groups by limit and key.
	ByKey By = "key"
)

const defaultMost, maxMost = 10, 1000

// TopConfig selects what Top returns. The zero TopConfig selects the ten limits with the most refusals.
type TopConfig struct {
	// Since and Until bound the start of a minute: Since <= start < Until. The zero time is no bound.
	Since, Until time.Time
	// By defaults to ByLimit.
	By By
	// Limit selects one limit by its name. Defaults to "", every limit.
	Limit string
	// Shadow selects refusals in shadow, which turned no request away, instead of the others.
	Shadow bool
	// Allowed selects the largest sums of allowed requests, instead of refusals. The sums of keys are estimates; see
	// [Counter.Allowed].
	Allowed bool
	// Most is the maximum number of sums, up to 1,000. Defaults to 10.
	Most int
}

// Sum adds up the refusals of a limit, a route or a key.
type Sum struct {
	// Limit is the limit's name.
	Limit string `json:"limit"`
	// Route is set for ByRoute.
	Route string `json:"route,omitzero"`
	// Key is the key as stored. It is set for ByKey. The empty key has the refusals of [ratelimit.Limit.Global], of keys
	// that were not among the heaviest, and of keys in a minute that is not over.
	Key string `json:"key,omitzero"`
	// Refused is the number of refusals. For a key it may be less than the true number, and is never more.
	Refused int64 `json:"refused,omitzero"`
	// Allowed is the number of allowed requests, if TopConfig.Allowed is set. Refused and Cost are then 0.
	Allowed int64 `json:"allowed,omitzero"`
	// Cost is the sum of the costs, in tokens.
	Cost float64 `json:"cost,omitzero"`
	// Last is the instant of the latest refusal. For the empty Key it is the latest of any key of the limit.
	Last time.Time `json:"last"`
}

// Check returns an error that wraps ratelimit.ErrInvalidRequest if a field is invalid.
func (c *TopConfig) Check() error {
	switch c.By {
	case "", ByLimit, ByRoute, ByKey:
	default:
		return fmt.Errorf("%w: refusals: By is %.20q; use limit, route or key", ratelimit.ErrInvalidRequest, string(c.By))
	}
	if c.Most < 0 || c.Most > maxMost {
		return fmt.Errorf("%w: refusals: Most is %d; use 1 to %d, or 0 for %d", ratelimit.ErrInvalidRequest, c.Most, maxMost,
			defaultMost)
	}
	return nil
}

// DB is a pool, a connection or a transaction.
type DB interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Top returns the sums with the most refusals, the largest first. It reads all rows of the selected minutes, so it
// doesn't count refusals that aren't written yet. schema is the table's schema; "" is "ratelimit". The error wraps
// ratelimit.ErrInvalidConfig if schema is invalid, and ratelimit.ErrInvalidRequest if config is invalid.
func Top(ctx context.Context, db DB, schema string, config TopConfig) ([]Sum, error) {
	if err := checkContext(ctx, "top"); err != nil {
		return nil, err
	}
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
	if err := checkHidden(ctx, db, schema); err != nil {
		return nil, fmt.Errorf("refusals: top: %w", pgerr.Explain(err, schema, privileges))
	}
	// Planned each time, for these minutes: a generic plan expects few rows, and sorts them instead of hashing.
	rows, err := db.Query(ctx, newStatements(schema).top, pgx.QueryExecModeExec, config.Since, config.Until,
		config.By == ByRoute, config.By == ByKey,
		clean(config.Limit, maxNameBytes+1), config.Shadow, cmp.Or(config.Most, defaultMost), config.Allowed)
	if err != nil {
		return nil, fmt.Errorf("refusals: top: %w", pgerr.Explain(err, schema, privileges))
	}
	sums, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (s Sum, err error) {
		var lastUs int64
		err = row.Scan(&s.Limit, &s.Route, &s.Key, &s.Refused, &s.Cost, &lastUs)
		s.Last = time.UnixMicro(lastUs)
		if config.Allowed {
			s.Allowed, s.Refused, s.Cost = s.Refused, 0, 0
		}
		return s, err
	})
	if err != nil {
		return nil, fmt.Errorf("refusals: top: %w", pgerr.Explain(err, schema, privileges))
	}
	return sums, nil
}

func checkContext(ctx context.Context, call string) error {
	if err := arg.CheckContext(ctx, call); err != nil {
		return fmt.Errorf("refusals: %w: %w", ratelimit.ErrInvalidRequest, err)
	}
	return nil
}

// checkHidden returns an error if row level security may hide rows of the table.
func checkHidden(ctx context.Context, db DB, schema string) error {
	rows, err := db.Query(ctx, "SELECT "+pgerr.Hidden("$1::text", "current_user", "refusals"), pgx.QueryExecModeExec,
		schema)
	if err != nil {
		return err
	}
	hidden, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	return pgerr.HiddenError(schema, hidden)
}

// pruneRows is how many rows a statement deletes at most.
const pruneRows = 10_000

// Prune deletes the rows of minutes that began before a time, the oldest first, and returns how many. It works in small
// transactions and skips rows that another process is deleting. After an error, the rows deleted so far stay deleted.
// Call it every hour or day.
func (c *Counter) Prune(ctx context.Context, before time.Time) (deleted int64, err error) {
	if err := checkContext(ctx, "prune"); err != nil {
		return 0, err
	}
	if err := checkHidden(ctx, c.pool, c.config.Schema); err != nil {
		return 0, fmt.Errorf("refusals: prune: %w", pgerr.Explain(err, c.config.Schema, privileges))
	}
	for {
		tag, err := c.pool.Exec(ctx, c.sql.prune, before, pruneRows)
		deleted += tag.RowsAffected()
		if err != nil {
			return deleted, fmt.Errorf("refusals: prune: %w", pgerr.Explain(err, c.config.Schema, privileges))
		}
		if tag.RowsAffected() < pruneRows {
			return deleted, nil
		}
	}
}
