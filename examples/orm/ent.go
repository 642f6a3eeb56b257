package orm

import (
	"context"
	stdsql "database/sql"

	"entgo.io/ent/dialect/sql"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/sqllimit"
)

// SendWithEnt sends in a transaction of ent's SQL driver, on which every generated client runs. A client that was generated with
// the feature sql/execquery is used in the same way, because its Tx passes statements to this transaction:
//
//	tx, err := client.Tx(ctx)
//	...
//	err = sqllimit.WithTx(limiter, tx).Require(ctx, SendMessage.For(author))
//	...
//	err = tx.Message.Create().SetAuthor(author).SetBody(body).Exec(ctx)
func SendWithEnt(ctx context.Context, driver *sql.Driver, limiter *ratelimit.Limiter, author, body string) error {
	begun, err := driver.Tx(ctx)
	if err != nil {
		return err
	}
	tx := begun.(*sql.Tx)
	defer func() { _ = tx.Rollback() }() // does nothing after the commit
	if err := sqllimit.WithTx(limiter, tx).Require(ctx, SendMessage.For(author), FreeTrials.Global()); err != nil {
		return err // limit exceeded: the transaction rolls back, and neither limit is charged
	}
	if err := insert(ctx, tx.Conn, driver.Dialect(), author, body); err != nil {
		return err
	}
	return tx.Commit()
}

// SendWithEntAgain sends in a transaction of InTx. A generated client runs on it as ent.NewClient(ent.Driver(sql.NewDriver(...))).
func SendWithEntAgain(ctx context.Context, driver *sql.Driver, limiter *ratelimit.Limiter, author, body string) error {
	return sqllimit.InTx(ctx, limiter, func(tx *stdsql.Tx, limits *ratelimit.Limiter) error {
		if err := limits.Require(ctx, SendMessage.For(author), FreeTrials.Global()); err != nil {
			return err
		}
		onTx := sql.NewDriver(driver.Dialect(), sql.Conn{ExecQuerier: tx})
		return insert(ctx, onTx.Conn, driver.Dialect(), author, body)
	})
}

// insert builds a statement as the code that ent generates does.
func insert(ctx context.Context, conn sql.Conn, dialect, author, body string) error {
	query, args := sql.Dialect(dialect).Insert("messages").Columns("author", "body").Values(author, body).Query()
	return conn.Exec(ctx, query, args, nil)
}
