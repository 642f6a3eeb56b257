package ratelimittest_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
	"github.com/pgratelimit/pgratelimit/sqllimit"
)

var failedLogins = ratelimit.Define("failedLogins", ratelimit.PerHour(3))

// Code that takes from a limit, tested without a server. TestLoginIsLimited in docs/testing.md tests a handler.
func ExampleNew() {
	t, ctx := new(testing.T), context.Background() // the test's own
	clock := ratelimittest.NewClock()
	limiter := ratelimittest.New(t, clock)
	for range 4 {
		fmt.Println(limiter.Require(ctx, failedLogins.For("ada")))
	}
	clock.Advance(20 * time.Minute)
	fmt.Println(limiter.Require(ctx, failedLogins.For("ada")))
	// Output:
	// <nil>
	// <nil>
	// <nil>
	// ratelimit: limited by failedLogins: retry after 20m
	// <nil>
}

// If the function of InTx fails, its tokens are returned, as in a database.
func ExampleDB() {
	ctx := context.Background()
	clock := ratelimittest.NewClock()
	limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{AsOf: clock.Now, RefusalCache: 100})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = limiter.InTx(ctx, func(tx pgx.Tx) error {
		if _, err := limiter.WithTx(tx).Take(ctx, failedLogins.For("ada")); err != nil {
			return err
		}
		return errors.New("the work failed")
	})
	fmt.Println(err)
	v, err := limiter.Value(ctx, failedLogins.For("ada"))
	fmt.Println(v.Tokens, err)
	// Output:
	// the work failed
	// 3 <nil>
}

// Code over a *sql.Tx, tested without a server: a rollback returns its tokens, and a commit keeps them spent.
func ExampleDB_OpenSQL() {
	ctx := context.Background()
	try := func(limiter *ratelimit.Limiter, tx *sql.Tx) error { // the code under test
		return sqllimit.WithTx(limiter, tx).Require(ctx, failedLogins.For("ada"))
	}
	buckets := ratelimittest.NewDB()
	db := buckets.OpenSQL(nil) // or with a *sql.DB for the code's own SQL, for example of sqlmock
	defer func() { _ = db.Close() }()
	limiter, err := ratelimit.New(buckets, ratelimit.Config{AsOf: ratelimittest.NewClock().Now})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, end := range []func(*sql.Tx) error{(*sql.Tx).Rollback, (*sql.Tx).Commit} {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(try(limiter, tx), end(tx))
		v, err := limiter.Value(ctx, failedLogins.For("ada"))
		fmt.Println(v.Tokens, err)
	}
	// Output:
	// <nil> <nil>
	// 3 <nil>
	// <nil> <nil>
	// 2 <nil>
}
