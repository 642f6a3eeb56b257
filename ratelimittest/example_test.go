package ratelimittest_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

var failedLogins = ratelimit.Define("failedLogins", ratelimit.PerHour(3))

// login is a handler as an application has it.
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

// What a function of InTx took is back when it fails, as in a database.
func ExampleDB() {
	ctx := context.Background()
	clock := ratelimittest.NewClock()
	limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{AsOf: clock.Now, DenyCache: 100})
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
