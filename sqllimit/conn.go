package sqllimit

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/internal/engine/store"
	"github.com/pgratelimit/pgratelimit/internal/pgerr"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// runner runs statements one after the other, up to the first that fails, and returns what each answered. An error is
// one of them all: they could not be sent, or not be committed.
type runner func(ctx context.Context, s statements) ([]answer, error)

// statements holds the statement of an Exec or Query, or the statements of a batch.
type statements struct {
	queries []*pgx.QueuedQuery
	exec    bool // of one alone: whether no rows are wanted, so that without parameters it may be several
}

// conn is a ratelimit.DB on a runner.
type conn struct{ run runner }

// one runs one statement.
func (c conn) one(ctx context.Context, exec bool, sql string, arguments []any) answer {
	answers, err := c.run(ctx, statements{[]*pgx.QueuedQuery{{SQL: sql, Arguments: arguments}}, exec})
	switch {
	case err != nil:
		return answer{err: explained(ctx, err)}
	case len(answers) != 1:
		return answer{err: fmt.Errorf("sqllimit: %d answers to a statement", len(answers))}
	}
	answers[0].err = explained(ctx, answers[0].err)
	return answers[0]
}

// Exec runs a statement.
func (c conn) Exec(ctx context.Context, sql string, arguments ...any) (pgconn.CommandTag, error) {
	a := c.one(ctx, true, sql, arguments)
	return a.tag, a.err
}

// Query runs a statement that answers with rows.
func (c conn) Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error) {
	a := c.one(ctx, false, sql, arguments)
	return &memoryRows{answer: a}, a.err
}

// QueryRow runs a statement that answers with one row.
func (c conn) QueryRow(ctx context.Context, sql string, arguments ...any) pgx.Row {
	rows, err := c.Query(ctx, sql, arguments...)
	return store.RowOf(rows, err)
}

// SendBatch runs statements.
func (c conn) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	if batch.Len() == 0 {
		return &memoryResults{}
	}
	answers, err := c.run(ctx, statements{queries: batch.QueuedQueries})
	for i := range answers {
		answers[i].err = explained(ctx, answers[i].err)
	}
	return &memoryResults{queries: batch.QueuedQueries, answers: answers, err: explained(ctx, err)}
}

// serverError is an error that the server answered with, as the driver has it and as pgx has it.
type serverError struct {
	error
	of *pgconn.PgError
}

// Unwrap returns both.
func (e *serverError) Unwrap() []error { return []error{e.error, e.of} }

// explained converts err so that the core finds in it the same as in an error of pgx: the server's error, and the end
// of ctx.
func explained(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	var ofPgx *pgconn.PgError
	var ofServer interface{ SQLState() string }
	switch {
	case errors.As(err, &ofPgx):
	case errors.As(err, &ofServer) && ofServer.SQLState() != "":
		severity := severityOf(ofServer.SQLState())
		err = &serverError{err, &pgconn.PgError{
			Severity: severity, SeverityUnlocalized: severity, Code: ofServer.SQLState(), Message: err.Error(),
		}}
	case errors.Is(err, driver.ErrBadConn):
		err = fmt.Errorf("sqllimit: the connection was lost: %w", err)
	}
	code := ""
	if errors.As(err, &ofServer) {
		code = ofServer.SQLState()
	}
	if ended := endOf(ctx); ended != nil && !errors.Is(err, ended) && (code == "" || code == pgerr.QueryCanceled) {
		err = fmt.Errorf("%w: %w", ended, err)
	}
	return err
}

// endOf returns why ctx has ended. A new connection gets the deadline of ctx, and may fail a moment before ctx reports
// it.
func endOf(ctx context.Context) error {
	if deadline, bounded := ctx.Deadline(); bounded && ctx.Err() == nil && !time.Now().Before(deadline) {
		return context.DeadlineExceeded
	}
	return ctx.Err()
}

// severityOf returns how severe an error is, which lib/pq has in the words of the server's language only. If the code
// leaves open whether the server ended the session, it assumes so: then the outcome of a COMMIT is unknown.
func severityOf(code string) string {
	const classLength = 2
	switch {
	case len(code) < classLength:
		return "FATAL"
	case code == pgerr.QueryCanceled:
		return "ERROR"
	// time of an idle session, or of a transaction; too many connections
	case code == "25P03", code == "25P04", code == "53300":
		return "FATAL"
	}
	switch code[:classLength] {
	case "08", "28", "57", "58", "F0", "XX":
		return "FATAL"
	}
	return "ERROR"
}

// callersTx is a transaction that the caller ends.
type callersTx struct {
	conn
	of Tx
}

var errNotOurs = errors.New("sqllimit: the transaction is for its owner to end")

// Commit is not for a Limiter to call.
func (*callersTx) Commit(context.Context) error { return errNotOurs }

// Rollback is not for a Limiter to call.
func (*callersTx) Rollback(context.Context) error { return errNotOurs }

// Identity returns a value that is the same for all Limiters of a transaction.
func (tx *callersTx) Identity() any { return tx.of }

// Engine returns the transaction of package ratelimittest that the caller's is one of, for a Limiter in memory, which
// is all that asks.
func (tx *callersTx) Engine() store.Ledgers { return engineOf(tx.of) }

// refusing is the runner for a value that is not a transaction.
func refusing(tx Tx) runner {
	err := fmt.Errorf("%w: WithTx with a %T, which is no transaction: pass what its BeginTx returned, or use sqllimit.New",
		ratelimit.ErrInvalidConfig, tx)
	return func(context.Context, statements) ([]answer, error) { return nil, err }
}
