package orm

import (
	"context"
	"database/sql"

	"github.com/uptrace/bun"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/sqllimit"
)

// SendWithBun sends in a transaction of bun. Pass tx.Tx, the *sql.Tx: a bun.Tx puts parameters into the text.
func SendWithBun(ctx context.Context, db *bun.DB, limiter *ratelimit.Limiter, author, body string) error {
	return db.RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error {
		if err := sqllimit.WithTx(limiter, tx.Tx).Require(ctx, SendMessage.For(author), FreeTrials.Global()); err != nil {
			return err // limit exceeded: the transaction rolls back, and neither limit is charged
		}
		_, err := tx.NewInsert().Model(&Message{Author: author, Body: body}).Exec(ctx)
		return err
	})
}

// SendWithBunAgain sends in a transaction of InTx.
func SendWithBunAgain(ctx context.Context, db *bun.DB, limiter *ratelimit.Limiter, author, body string) error {
	return sqllimit.InTx(ctx, limiter, func(tx *sql.Tx, limits *ratelimit.Limiter) error {
		if err := limits.Require(ctx, SendMessage.For(author), FreeTrials.Global()); err != nil {
			return err
		}
		_, err := db.NewInsert().Conn(tx).Model(&Message{Author: author, Body: body}).Exec(ctx)
		return err
	})
}
