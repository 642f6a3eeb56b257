package orm

import (
	"context"
	"database/sql"

	"github.com/jmoiron/sqlx"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/sqllimit"
)

// SendWithSQLX sends in a transaction of sqlx, which holds a *sql.Tx.
func SendWithSQLX(ctx context.Context, db *sqlx.DB, limiter *ratelimit.Limiter, author, body string) error {
	tx, err := db.BeginTxx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // does nothing after the commit
	if err := sqllimit.WithTx(limiter, tx.Tx).Require(ctx, SendMessage.For(author), FreeTrials.Global()); err != nil {
		return err // limit exceeded: the transaction rolls back, and neither limit is charged
	}
	_, err = tx.NamedExecContext(ctx, `INSERT INTO messages (author, body) VALUES (:author, :body)`,
		map[string]any{"author": author, "body": body})
	if err != nil {
		return err
	}
	return tx.Commit()
}

// SendWithSQLXAgain sends in a transaction of InTx.
func SendWithSQLXAgain(ctx context.Context, db *sqlx.DB, limiter *ratelimit.Limiter, author, body string) error {
	return sqllimit.InTx(ctx, limiter, func(tx *sql.Tx, limits *ratelimit.Limiter) error {
		if err := limits.Require(ctx, SendMessage.For(author), FreeTrials.Global()); err != nil {
			return err
		}
		query, args, err := db.BindNamed(`INSERT INTO messages (author, body) VALUES (:author, :body)`,
			map[string]any{"author": author, "body": body})
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, query, args...)
		return err
	})
}
