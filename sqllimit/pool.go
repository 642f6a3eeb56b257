package sqllimit

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/internal/engine/store"
)

// pool is a ratelimit.Pool on a *sql.DB. It sends statements only on a connection that it holds. A *sql.DB retries a
// statement on another connection if the driver reports a bad connection, and lib/pq reports that for a connection lost
// while waiting for an answer. Then a call would take twice.
type pool struct {
	conn
	db *sql.DB
}

func newPool(db *sql.DB) *pool {
	p := &pool{db: db}
	p.run = func(ctx context.Context, s statements) ([]answer, error) {
		own, err := db.Conn(ctx)
		if err != nil {
			return nil, err
		}
		defer func() { _ = own.Close() }() // back to the pool
		return onConn(ctx, own, s)
	}
	return p
}

// Engine returns what the buckets are in when db is one of package ratelimittest, and else nil.
func (p *pool) Engine() store.Ledgers {
	if d, ok := p.db.Driver().(interface{ Engine() store.Ledgers }); ok {
		return d.Engine()
	}
	return nil
}

// BeginTx begins a transaction. ctx ends the wait for that; the transaction does not end with it, so that a COMMIT that
// has been sent is not cut short.
func (p *pool) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	own, err := p.db.Conn(ctx)
	if err != nil {
		return nil, explained(ctx, err)
	}
	lifetime, end := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, end)
	tx, err := own.BeginTx(lifetime, &sql.TxOptions{Isolation: levelOf(options.IsoLevel)})
	if !stop() && err == nil { // ctx ended just now
		_ = tx.Rollback()
		err = ctx.Err()
	}
	if err != nil {
		end()
		_ = own.Close()
		return nil, explained(ctx, err)
	}
	t := &ownTx{tx: tx, own: own, end: end}
	run := runnerOf(tx)
	t.run = func(ctx context.Context, s statements) ([]answer, error) {
		answers, err := run(ctx, s)
		t.lost = t.lost || errors.Is(err, driver.ErrBadConn) || len(answers) > 0 &&
			errors.Is(answers[len(answers)-1].err, driver.ErrBadConn)
		return answers, err
	}
	return t, nil
}

func levelOf(level pgx.TxIsoLevel) sql.IsolationLevel {
	switch level {
	case pgx.Serializable:
		return sql.LevelSerializable
	case pgx.RepeatableRead:
		return sql.LevelRepeatableRead
	case pgx.ReadCommitted:
		return sql.LevelReadCommitted
	case pgx.ReadUncommitted:
		return sql.LevelReadUncommitted
	}
	return sql.LevelDefault
}

// ownTx is a transaction that the Limiter began, with a connection that it holds until it has ended.
type ownTx struct {
	conn
	tx   *sql.Tx
	own  *sql.Conn
	end  context.CancelFunc // cancels statements that have not ended in time
	lost bool               // whether the driver said of a call's statement that the connection was bad
}

// Engine returns the engine for the driver of the transaction, as pool does.
func (t *ownTx) Engine() store.Ledgers { return engineOf(t.tx) }

// isDone reports whether the transaction was ended. It sends nothing.
func (t *ownTx) isDone(ctx context.Context) bool {
	v := visit{run: func(*pgx.Conn) ([]answer, error) { return nil, nil }}
	_, err := v.of(context.WithoutCancel(ctx), t.tx)
	return errors.Is(err, sql.ErrTxDone)
}

// IsClosed reports whether the connection is lost.
func (t *ownTx) IsClosed() bool {
	closed := t.lost
	err := t.own.Raw(func(of any) error {
		if c, ok := of.(interface{ Conn() *pgx.Conn }); ok {
			closed = closed || c.Conn().IsClosed()
		} else if c, ok := of.(driver.Validator); ok {
			closed = closed || !c.IsValid()
		}
		return nil
	})
	return closed || err != nil
}

// IsIdle reports whether the connection is in no transaction any more. Only a connection of pgx provides it.
func (t *ownTx) IsIdle() (idle bool) {
	_ = t.own.Raw(func(of any) error {
		if c, ok := of.(interface{ Conn() *pgx.Conn }); ok {
			idle = !c.Conn().IsClosed() && c.Conn().PgConn().TxStatus() == 'I'
		}
		return nil
	})
	return idle
}

// Commit commits. If the server rolled the transaction back instead, because a statement had failed in it, it returns
// pgx.ErrTxCommitRollback.
func (t *ownTx) Commit(ctx context.Context) error {
	defer t.release()
	defer context.AfterFunc(ctx, t.end)()
	err := t.tx.Commit()
	var answered interface{ SQLState() string }
	switch {
	case err == nil:
		return nil
	case errors.Is(err, pgx.ErrTxCommitRollback), errors.As(err, &answered), errors.Is(err, sql.ErrTxDone),
		ctx.Err() != nil, t.IsClosed():
		return explained(ctx, err)
	}
	// The connection is as good as before and the server said nothing: the driver rolled back, as lib/pq does.
	return fmt.Errorf("%w: %w", pgx.ErrTxCommitRollback, err)
}

// Rollback rolls back.
func (t *ownTx) Rollback(ctx context.Context) error {
	defer t.release()
	defer context.AfterFunc(ctx, t.end)()
	return explained(ctx, t.tx.Rollback())
}

// release gives the connection back.
func (t *ownTx) release() {
	t.end()
	_ = t.own.Close()
}

var errOnlySQL = errors.New("sqllimit: a transaction of database/sql does not do this; use InTx of package sqllimit")

// Begin is part of pgx.Tx. InTx of this package never passes it to its function.
func (t *ownTx) Begin(context.Context) (pgx.Tx, error) { return nil, errOnlySQL }

// CopyFrom is for pgx.Tx.
func (t *ownTx) CopyFrom(context.Context, pgx.Identifier, []string, pgx.CopyFromSource) (int64, error) {
	return 0, errOnlySQL
}

// Prepare is for pgx.Tx.
func (t *ownTx) Prepare(context.Context, string, string) (*pgconn.StatementDescription, error) {
	return nil, errOnlySQL
}

// LargeObjects is for pgx.Tx.
func (t *ownTx) LargeObjects() pgx.LargeObjects { return pgx.LargeObjects{} }

// Conn is for pgx.Tx, and returns nil.
func (t *ownTx) Conn() *pgx.Conn { return nil }
