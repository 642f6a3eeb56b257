package orm

import (
	"context"
	"database/sql"
	"fmt"

	"gorm.io/gorm"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/sqllimit"
)

// Message is a row of messages, for GORM and bun.
type Message struct {
	ID     int64 `bun:",pk,autoincrement"`
	Author string
	Body   string
}

// SQLTx returns the *sql.Tx of a transaction of GORM, also with PrepareStmt.
func SQLTx(tx *gorm.DB) (*sql.Tx, error) {
	pool := tx.Statement.ConnPool
	if prepared, ok := pool.(*gorm.PreparedStmtTX); ok {
		pool = prepared.Tx
	}
	if own, ok := pool.(*sql.Tx); ok {
		return own, nil
	}
	return nil, fmt.Errorf("GORM has a %T, and no transaction of database/sql", pool)
}

// SendWithGORM sends in a transaction of GORM.
func SendWithGORM(ctx context.Context, db *gorm.DB, limiter *ratelimit.Limiter, author, body string) error {
	return db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		own, err := SQLTx(tx)
		if err != nil {
			return err
		}
		if err := sqllimit.WithTx(limiter, own).Require(ctx, SendMessage.For(author), FreeTrials.Global()); err != nil {
			return err // limit exceeded: the transaction rolls back, and neither limit is charged
		}
		return tx.Create(&Message{Author: author, Body: body}).Error
	})
}

// SendWithGORMAgain sends in a transaction of InTx.
func SendWithGORMAgain(ctx context.Context, db *gorm.DB, limiter *ratelimit.Limiter, author, body string) error {
	return sqllimit.InTx(ctx, limiter, func(tx *sql.Tx, limits *ratelimit.Limiter) error {
		if err := limits.Require(ctx, SendMessage.For(author), FreeTrials.Global()); err != nil {
			return err
		}
		inTx := db.Session(&gorm.Session{NewDB: true, Context: ctx, SkipDefaultTransaction: true})
		inTx.Statement.ConnPool = tx
		return inTx.Create(&Message{Author: author, Body: body}).Error
	})
}
