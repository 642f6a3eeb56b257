// Command quickstart sends a message: at most three at once and ten a minute for each author. The limit and the message
// are in one transaction, so that both are kept or neither is.
//
//	export DATABASE_URL=postgres://localhost/postgres
//	go run . ada hello
package main

import (
	"context"
	"errors"
	"fmt"
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
	log.SetFlags(0)
	if len(os.Args) != 3 {
		log.Fatal("usage: quickstart AUTHOR MESSAGE")
	}
	if err := run(context.Background(), os.Args[1], os.Args[2]); err != nil {
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
	err = limiter.InTx(ctx, func(tx pgx.Tx) error {
		if err := limiter.WithTx(tx).Require(ctx, sendMessage.For(author)); err != nil {
			return err // the transaction rolls back, and no token is taken
		}
		_, err := tx.Exec(ctx, `INSERT INTO messages (author, body) VALUES ($1, $2)`, author, body)
		return err
	})
	if limited, ok := errors.AsType[*ratelimit.LimitedError](err); ok {
		return fmt.Errorf("too many messages: try again in %v", limited.Decision.RetryAfter.Round(time.Millisecond))
	}
	return err
}
