package sqllimit_test

import (
	"context"
	"database/sql"
	"log"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/sqllimit"
)

var exampleSendMessage = ratelimit.Define("sendMessage", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3})

// A Limiter on a *sql.DB, and a transaction that InTx retries after a conflict.
func Example() {
	db, err := sql.Open("pgx", "postgres://localhost/app") // of package stdlib of pgx
	if err != nil {
		log.Fatal(err)
	}
	limiter, err := sqllimit.New(db, ratelimit.Config{})
	if err != nil {
		log.Fatal(err)
	}
	ctx := context.Background()
	err = sqllimit.InTx(ctx, limiter, func(tx *sql.Tx, limits *ratelimit.Limiter) error {
		if err := limits.Require(ctx, exampleSendMessage.For("ada")); err != nil {
			return err // limit exceeded: it rolls back
		}
		_, err := tx.ExecContext(ctx, `INSERT INTO messages (author, body) VALUES ($1, $2)`, "ada", "hello")
		return err
	})
	if err != nil {
		log.Print(err)
	}
}

// In your own transaction: the take commits and rolls back with it.
func ExampleWithTx() {
	var limiter *ratelimit.Limiter // of ratelimit.New or of sqllimit.New
	send := func(ctx context.Context, tx *sql.Tx, author, body string) error {
		if err := sqllimit.WithTx(limiter, tx).Require(ctx, exampleSendMessage.For(author)); err != nil {
			return err // and the caller rolls back
		}
		_, err := tx.ExecContext(ctx, `INSERT INTO messages (author, body) VALUES ($1, $2)`, author, body)
		return err
	}
	_ = send
}
