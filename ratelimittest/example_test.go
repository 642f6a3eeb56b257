package ratelimittest_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
	"github.com/pgratelimit/pgratelimit/sqllimit"
)

var failedLogins = ratelimit.Define("failedLogins", ratelimit.PerHour(3))

// login is a handler of an application.
func login(limiter *ratelimit.Limiter) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		d, err := limiter.Take(r.Context(), failedLogins.For(r.FormValue("user")))
		switch {
		case err != nil:
			http.Error(w, "try again", http.StatusServiceUnavailable)
		case !d.Allowed:
			http.Error(w, fmt.Sprint("try again in ", d.RetryAfter), http.StatusTooManyRequests)
		default:
			http.Error(w, "wrong password", http.StatusUnauthorized)
		}
	})
}

// A handler, tested without a server.
func ExampleNew() {
	t := new(testing.T) // the test's own
	clock := ratelimittest.NewClock()
	handler := login(ratelimittest.New(t, clock))
	try := func() {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/login?user=ada", http.NoBody))
		fmt.Print(w.Code, " ", w.Body)
	}
	for range 4 {
		try()
	}
	clock.Advance(20 * time.Minute)
	try()
	// Output:
	// 401 wrong password
	// 401 wrong password
	// 401 wrong password
	// 429 try again in 20m0s
	// 401 wrong password
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
