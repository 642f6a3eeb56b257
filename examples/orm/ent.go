package orm

//go:generate go run -mod=mod entgo.io/ent/cmd/ent@v0.14.5 generate --feature sql/execquery ./ent/schema

import (
	"context"
	"database/sql"

	"entgo.io/ent/dialect"
	entsql "entgo.io/ent/dialect/sql"

	"github.com/pgratelimit/pgratelimit/examples/orm/ent"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/sqllimit"
)

// SendWithEnt sends in a transaction of ent, whose client was generated with the feature sql/execquery.
func SendWithEnt(ctx context.Context, client *ent.Client, limiter *ratelimit.Limiter, author, body string) error {
	tx, err := client.Tx(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // does nothing after the commit
	if err := sqllimit.WithTx(limiter, tx).Require(ctx, SendMessage.For(author), FreeTrials.Global()); err != nil {
		return err // limit exceeded: the transaction rolls back, and neither limit is charged
	}
	if err := tx.Message.Create().SetAuthor(author).SetBody(body).Exec(ctx); err != nil {
		return err
	}
	return tx.Commit()
}

// SendWithEntAgain sends in a transaction of InTx.
func SendWithEntAgain(ctx context.Context, limiter *ratelimit.Limiter, author, body string) error {
	return sqllimit.InTx(ctx, limiter, func(tx *sql.Tx, limits *ratelimit.Limiter) error {
		if err := limits.Require(ctx, SendMessage.For(author), FreeTrials.Global()); err != nil {
			return err
		}
		client := ent.NewClient(ent.Driver(entsql.NewDriver(dialect.Postgres, entsql.Conn{ExecQuerier: tx})))
		return client.Message.Create().SetAuthor(author).SetBody(body).Exec(ctx)
	})
}
