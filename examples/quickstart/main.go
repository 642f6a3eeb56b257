// Command quickstart stores a message: each author may send three at once and ten a minute. The limit and the message
// share a transaction, so both are kept or neither is.
//
//	DATABASE_URL=postgres://localhost/postgres go run .
package main

import (
	"context"
	"log"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

var sendMessage = ratelimit.Define("sendMessage", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3})

func main() {
	if err := run(context.Background(), "ada", "hello"); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, author, body string) error {
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := migrations.Up(ctx, pool, migrations.Config{}); err != nil { // creates the limiter's tables, once
		return err
	}
	if _, err := pool.Exec(ctx, `CREATE TABLE IF NOT EXISTS messages (author text, body text)`); err != nil {
		return err
	}
	limiter, err := ratelimit.New(pool, ratelimit.Config{})
	if err != nil {
		return err
	}
	return limiter.InTx(ctx, func(tx pgx.Tx) error {
		if err := limiter.WithTx(tx).Require(ctx, sendMessage.For(author)); err != nil {
			return err // over the limit: the transaction rolls back, and the error says when to retry
		}
		_, err := tx.Exec(ctx, `INSERT INTO messages (author, body) VALUES ($1, $2)`, author, body)
		return err
	})
}
