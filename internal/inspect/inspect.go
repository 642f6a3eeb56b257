// Package inspect reads the tables for people: the limits, buckets that owe tokens, waiting reservations, refusals.
// Each query reads a bounded number of rows, and returns where the next query continues. It makes no decisions.
package inspect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/internal/pgerr"
)

// ErrInvalid is in the chain of errors that a query returns that cannot be answered.
var ErrInvalid = errors.New("inspect: invalid")

// DB is the database to read: a pool, a connection or a transaction.
type DB interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Reader reads the tables of a schema. It is safe for concurrent use when its DB is.
type Reader struct {
	db     DB
	schema string
	sql    statements
	look   looks

	checked atomic.Pointer[time.Time] // when row level security was last known to hide no row
}

// looks are how many rows the queries look at that do not say it themselves.
type looks struct{ reservations, refusals, refusedKeys int }

const (
	defaultSchema = "ratelimit"
	// What the tables can hold of a name and a key.
	maxNameBytes, maxKeyBytes = 64, 256
)

// New returns a Reader of the tables in a schema; "" is "ratelimit". It sends nothing. The error wraps ErrInvalid.
func New(db DB, schema string) (*Reader, error) {
	schema = cmp.Or(schema, defaultSchema)
	if db == nil {
		return nil, invalid("the DB is nil; pass a pool, a connection or a transaction")
	}
	if err := arg.CheckSchema(schema); err != nil {
		return nil, invalid("%w", err)
	}
	return &Reader{
		db: db, schema: schema, sql: newStatements(schema),
		look: looks{reservations: lookReservations, refusals: lookRefusals, refusedKeys: lookRefusedKeys},
	}, nil
}

// Now returns what time it is on the database's clock.
func (r *Reader) Now(ctx context.Context) (time.Time, error) {
	now, err := collect(ctx, r, "now", pgx.RowTo[int64], nowSQL)
	if err != nil {
		return time.Time{}, err
	}
	return instant(now[0]), nil
}

// collect returns the rows that a statement returns. The statement is planned each time, for its parameters. A generic
// plan underestimates the minutes of an hour, or the buckets of a limit.
func collect[T any](ctx context.Context, r *Reader, doing string, scan pgx.RowToFunc[T], sql string,
	args ...any,
) ([]T, error) {
	if err := r.checkHidden(ctx); err != nil {
		return nil, r.explain(doing, err)
	}
	rows, err := r.db.Query(ctx, sql, append([]any{pgx.QueryExecModeExec}, args...)...)
	if err != nil {
		return nil, r.explain(doing, err)
	}
	found, err := pgx.CollectRows(rows, scan)
	if err != nil {
		return nil, r.explain(doing, err)
	}
	return found, nil
}

// checkedFor is how long a Reader does not look again whether row level security may hide rows.
const checkedFor = 10 * time.Second

// checkHidden returns an error if row level security may hide rows of the tables from the reader.
func (r *Reader) checkHidden(ctx context.Context) error {
	if checked := r.checked.Load(); checked != nil && time.Since(*checked) < checkedFor {
		return nil
	}
	now := time.Now()
	rows, err := r.db.Query(ctx, r.sql.hidden, pgx.QueryExecModeExec)
	if err != nil {
		return err
	}
	hidden, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[string])
	if err == nil {
		err = pgerr.HiddenError(r.schema, hidden)
	}
	if err == nil {
		r.checked.Store(&now)
	}
	return err
}

// explain adds the action that failed, and its remedy, to err.
func (r *Reader) explain(doing string, err error) error {
	return fmt.Errorf("inspect: %s: %w", doing, pgerr.Explain(err, r.schema, "the privileges of a Reader"))
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrInvalid}, args...)...)
}

// checkName returns an error when no limit can have the name.
func checkName(name string) error { return checkText("the limit", name, maxNameBytes) }

// checkKey returns an error when no bucket can have the key.
func checkKey(what, key string) error { return checkText(what, key, maxKeyBytes) }

// checkBucket returns an error when no limit can have the name, or no bucket the key.
func checkBucket(limit, key string) error { return cmp.Or(checkName(limit), checkKey("the key", key)) }

func checkText(what, text string, most int) error {
	if len(text) > most || !utf8.ValidString(text) || strings.IndexByte(text, 0) >= 0 {
		return invalid("%s is %.80q; use up to %d bytes of UTF-8 without NUL", what, text, most)
	}
	return nil
}

// checkMost returns most, and byDefault for 0.
func checkMost(what string, most, byDefault int) (int, error) {
	if most < 0 || most > maxMost {
		return 0, invalid("%s is %d; use 1 to %d, or 0 for %d", what, most, maxMost, byDefault)
	}
	return cmp.Or(most, byDefault), nil
}

// next returns the first text after one, in the order of its bytes: the tables hold no NUL.
func next(text string) string { return text + "\x01" }

func instant(us int64) time.Time { return time.UnixMicro(us).UTC() }

// optional returns an instant, the zero time for null.
func optional(us *int64) time.Time {
	if us == nil {
		return time.Time{}
	}
	return instant(*us)
}
