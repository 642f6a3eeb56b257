package rules

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/pgerr"
)

// loaded is what the table holds, as it was read.
type loaded struct {
	version, now int64
	asked        time.Time // before now was read
	ahead        time.Duration
	late         int64 // how long before now the latest change began, in microseconds; nothing is new: neverLate
	rows         []row // in the order in which they were made
}

// neverLate is what loaded.late is when nothing is new.
const neverLate = int64(math.MinInt64 / 2)

// unknown is the version before the first load.
const unknown = -1

// beginner is a pool or a connection.
type beginner interface {
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

// load reads the table in one snapshot. Statements newer than the version known show how late the program was notified.
func load(ctx context.Context, db beginner, sql *statements, known int64) (*loaded, error) {
	l := &loaded{asked: time.Now(), late: neverLate}
	err := readOnly(ctx, db, func(tx pgx.Tx) (err error) {
		if l.version, l.now, l.ahead, err = sql.askVersion(ctx, tx); err != nil {
			return err
		}
		if l.version == 0 && known > 0 {
			return fmt.Errorf("the tables have no rules, and version %d is loaded; if they were created again, start the program "+
				"again", known)
		}
		rows, err := tx.Query(ctx, sql.load, maxChain+1, l.now-kept.Microseconds(), l.now)
		if err != nil {
			return err
		}
		l.rows, err = pgx.CollectRows(rows, rowOf)
		return err
	})
	if err != nil {
		return nil, err
	}
	for i := range l.rows {
		if r := &l.rows[i]; known != unknown && r.version > known && (r.of == OfRule || r.of == OfOverride) {
			l.late = max(l.late, l.now-r.from)
		}
	}
	return l, nil
}

// rower is a pool, a connection or a transaction.
type rower interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// askVersion returns the version of the rules, the database's time, and how far the database's clock is ahead of this
// process's.
func (sql *statements) askVersion(ctx context.Context, db rower) (version, now int64, ahead time.Duration, err error) {
	asked := time.Now()
	var hidden string
	err = db.QueryRow(ctx, sql.versionAndTime).Scan(&version, &now, &hidden)
	if err == nil {
		err = pgerr.HiddenError(sql.schema, hidden)
	}
	return version, now, aheadOf(asked, time.Now(), time.UnixMicro(now)), err
}

// aheadOf returns the smallest difference of two clocks that explains that one showed now while the other went from
// asked to answered.
func aheadOf(asked, answered, now time.Time) time.Duration {
	switch {
	case now.After(answered):
		return now.Sub(answered)
	case now.Before(asked):
		return now.Sub(asked)
	}
	return 0
}

// readOnly runs fn in a transaction with one snapshot of the table.
func readOnly(ctx context.Context, db beginner, fn func(tx pgx.Tx) error) error {
	tx, err := db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	if err := fn(tx); err != nil {
		return err
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("end of the read: %w", err)
	}
	return nil
}

// lateness returns how long after its beginning the latest change is in use, when it is from now on.
func (l *loaded) lateness() time.Duration {
	late := l.late + time.Since(l.asked).Microseconds()
	return time.Duration(min(max(late, 0), math.MaxInt64/1000)) * time.Microsecond
}
