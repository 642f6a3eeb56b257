package docs_test

import (
	"context"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The variables and functions below hold code blocks of docs/recipes.md. The tests of recipesdocrun_test.go run each of them, and check
// the figures of the page.

var Interactive = ratelimit.Define("interactive", ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 50})

func recipeRegion(share float64) ratelimit.Limit {
	limit := ratelimit.Define("api", ratelimit.TokenBucket{Rate: 100 * share, Period: time.Second, Capacity: 50 * share})
	return limit
}

var ModelTokens = ratelimit.Define("modelTokens",
	ratelimit.TokenBucket{Rate: 40_000, Period: time.Minute, Capacity: 40_000})

func recipeCost(limiter *ratelimit.Limiter, user httplimit.Key, complete http.Handler) (http.Handler, error) {
	limited, err := httplimit.New(limiter, httplimit.Config{Limits: []httplimit.Limit{
		{
			Limit: ModelTokens, Key: user, Unit: "tokens",
			Cost: httplimit.StatedCost{Header: "X-Tokens", Default: 500, Max: 40_000},
		},
	}})
	if err != nil {
		return nil, err
	}
	return limited(complete), nil
}

var HalfAndHalf = ratelimit.Define("half", ratelimit.TokenBucket{Rate: 50, Period: time.Minute, Capacity: 50})

var Spaced = ratelimit.Define("spaced",
	ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: ratelimit.None})

func recipeSpaced(ctx context.Context, limiter *ratelimit.Limiter, schedule func(time.Time)) error {
	r, err := limiter.Reserve(ctx, Spaced.Global())
	if err != nil {
		return err
	}
	schedule(r.ReadyAt)
	return nil
}

var Cooldown = ratelimit.Define("cooldown", ratelimit.TokenBucket{Rate: 1, Period: 30 * time.Second})

func recipeCooldown(ctx context.Context, limiter *ratelimit.Limiter, userID string, publish func(pgx.Tx) error) error {
	err := limiter.InTx(ctx, func(tx pgx.Tx) error {
		if err := limiter.WithTx(tx).Require(ctx, Cooldown.For(userID)); err != nil {
			return err
		}
		return publish(tx) // if it fails, the cooldown has not begun
	})
	return err
}

var (
	LoginAccount = ratelimit.Define("login.account", ratelimit.TokenBucket{Rate: 20, Period: time.Hour, Capacity: 5})
	LoginAddress = ratelimit.Define("login.address", ratelimit.TokenBucket{Rate: 120, Period: time.Hour, Capacity: 30})
)

func recipeLogin(ctx context.Context, limiter *ratelimit.Limiter, account, address string, matches func() bool, admit func(pgx.Tx) error) error {
	// It is committed before the password is verified.
	if err := limiter.Require(ctx, LoginAccount.For(account), LoginAddress.For(address)); err != nil {
		return err
	}
	if !matches() { // as slow for an account that does not exist
		return errWrongPassword
	}
	return limiter.InTx(ctx, func(tx pgx.Tx) error {
		if err := admit(tx); err != nil {
			return err
		}
		if err := limiter.WithTx(tx).Reset(ctx, LoginAccount.For(account)); err != nil {
			return err
		}
		return limiter.WithTx(tx).Credit(ctx, LoginAddress.For(address)) // its one token: not a reset
	})
}
