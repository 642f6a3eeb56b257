package sqllimit

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/engine/store"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// sendOn runs statements on a connection of pgx, in a round trip.
func sendOn(ctx context.Context, conn *pgx.Conn, s statements) ([]answer, error) {
	if len(s.queries) == 1 {
		q := s.queries[0]
		if s.exec {
			tag, err := conn.Exec(ctx, q.SQL, q.Arguments...)
			return []answer{{tag: tag, err: err}}, nil
		}
		a := readAnswer(conn.Query(ctx, q.SQL, q.Arguments...))
		a.conn = conn
		return []answer{a}, nil
	}
	results := conn.SendBatch(ctx, &pgx.Batch{QueuedQueries: s.queries})
	answers := make([]answer, 0, len(s.queries))
	for range s.queries {
		a := readAnswer(results.Query())
		answers = append(answers, a)
		if a.err != nil {
			break
		}
	}
	err := results.Close()
	if err != nil && answers[len(answers)-1].err != nil { // it is the same
		err = nil
	}
	return answers, err
}

// runnerOf returns the runner on a transaction, which asks at the first statement which driver it is of.
func runnerOf(tx Tx) runner {
	if isPool(tx) {
		return refusing(tx)
	}
	notPgx := false
	return func(ctx context.Context, s statements) ([]answer, error) {
		if !notPgx {
			v := visit{run: func(conn *pgx.Conn) ([]answer, error) {
				if conn.PgConn().TxStatus() == idle {
					return nil, errNoTransaction(tx)
				}
				return sendOn(ctx, conn, s)
			}}
			isPgx, err := v.of(ctx, tx)
			if isPgx || err != nil {
				return v.answers, err
			}
			notPgx = true
		}
		return runPlain(ctx, tx, s), nil
	}
}

// idle is what the server says of a connection on which no transaction was begun.
const idle = 'I'

func errNoTransaction(tx Tx) error {
	return fmt.Errorf("%w: WithTx with a %T on which no transaction was begun: begin one, and pass what that returned",
		ratelimit.ErrInvalidConfig, tx)
}

// isPool reports whether tx runs each statement wherever there is a connection, as a *sql.DB does, and what GORM puts
// around one to prepare statements.
func isPool(tx Tx) bool {
	if _, ok := tx.(interface{ Stats() sql.DBStats }); ok {
		return true
	}
	_, holdsPool := tx.(interface{ GetDBConn() (*sql.DB, error) })
	_, ends := tx.(interface{ Commit() error })
	return holdsPool && !ends
}

// errVisited is what a visit ends with, in place of a statement.
var errVisited = errors.New("sqllimit: done before the statement, which is not sent")

// visit is the parameter of a statement that is never sent. It makes a connection of pgx run other statements in its
// place. A *sql.Tx does not reveal its connection. But stdlib passes parameters to pgx unchanged, and pgx calls a
// QueryRewriter among them with the connection. Its statements run under the locks of database/sql, so the transaction
// cannot end meanwhile.
//
// With any other driver, database/sql calls the parameter's Value, which returns an error.
type visit struct {
	run     func(conn *pgx.Conn) ([]answer, error)
	seen    bool
	answers []answer
	err     error
	engine  store.Ledgers // nil: the connection is none of package ratelimittest
}

// VisitEngine is called by package ratelimittest, in place of both.
func (v *visit) VisitEngine(engine store.Ledgers) { v.engine = engine }

// engineOf returns the transaction in memory that tx is one of, and nil when it is none. It sends nothing.
func engineOf(tx Tx) store.Ledgers {
	if isPool(tx) {
		return nil
	}
	v := visit{run: func(*pgx.Conn) ([]answer, error) { return nil, nil }}
	_, _ = v.of(context.Background(), tx) // that it has ended, a call says
	return v.engine
}

// RewriteQuery is called by pgx.
func (v *visit) RewriteQuery(_ context.Context, conn *pgx.Conn, _ string,
	_ []any,
) (sql string, arguments []any, err error) {
	v.seen = true
	v.answers, v.err = v.run(conn)
	return "", nil, errVisited
}

// Value is called for any other driver.
func (v *visit) Value() (driver.Value, error) { return nil, errVisited }

// of visits the connection of tx. isPgx is false for a connection of another driver, to which nothing was sent.
func (v *visit) of(ctx context.Context, tx Tx) (isPgx bool, err error) {
	_, err = tx.ExecContext(ctx, "SELECT 1 /* of ratelimit; not sent */", v)
	switch {
	case v.seen:
		return true, v.err
	case errors.Is(err, errVisited):
		return false, nil
	case err != nil && !strings.Contains(err.Error(), noParameters):
		return false, err
	}
	return false, fmt.Errorf("%w: WithTx with a %T, which does not pass parameters on: pass the *sql.Tx that it holds",
		ratelimit.ErrInvalidConfig, tx)
}

// noParameters is what database/sql says of a statement that was prepared before it has parameters, as GORM does with
// PrepareStmt.
const noParameters = "expected 0 arguments, got 1"

// onConn runs statements, outside of a transaction, on a connection that database/sql has handed out.
func onConn(ctx context.Context, conn *sql.Conn, s statements) (answers []answer, err error) {
	isPgx := false
	rawErr := conn.Raw(func(of any) error {
		own, ok := of.(interface{ Conn() *pgx.Conn })
		if !ok {
			return nil
		}
		isPgx = true
		if own.Conn().IsClosed() {
			return driver.ErrBadConn
		}
		answers, err = sendOn(ctx, own.Conn(), s)
		return nil
	})
	switch {
	case rawErr != nil:
		return nil, rawErr
	case isPgx:
		return answers, err
	case len(s.queries) == 1:
		return runPlain(ctx, conn, s), nil
	}
	return runTogether(ctx, conn, s)
}

// runTogether runs statements in a transaction of their own, which pgx does with the message that they are sent in.
func runTogether(ctx context.Context, conn *sql.Conn, s statements) ([]answer, error) {
	tx, err := conn.BeginTx(ctx, nil)
	if err != nil {
		return nil, err
	}
	answers := runPlain(ctx, tx, s)
	end := tx.Commit
	if answers[len(answers)-1].err != nil { // which says what there is to say
		end = func() error { _ = tx.Rollback(); return nil }
	}
	return answers, end()
}
