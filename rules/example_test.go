package rules_test

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// A program decides by stored rules, and by its own definitions for limits without a rule.
func ExampleSet() {
	_ = func(ctx context.Context, pool *pgxpool.Pool) (*ratelimit.Limiter, error) {
		set, err := rules.NewSet(pool, rules.Config{})
		if err != nil {
			return nil, err
		}
		go func() { _ = set.Run(ctx) }() // until ctx ends
		return ratelimit.New(pool, ratelimit.Config{Policies: set})
	}
}

// A customer gets five times as much until the end of the week, in every program from the same instant on.
func ExampleStore_Override() {
	_ = func(ctx context.Context, pool *pgxpool.Pool, limiter *ratelimit.Limiter, customer string) error {
		store, err := rules.NewStore(pool, rules.StoreConfig{})
		if err != nil {
			return err
		}
		key, err := limiter.StoredKey(messages.For(customer))
		if err != nil {
			return err
		}
		_, err = store.Override(ctx, rules.Edit{Author: "ana", Reason: "their launch"}, rules.Override{
			Limit: "messages", Key: key, Multiplier: 5, Until: time.Now().Add(ratelimit.Week),
		})
		return err
	}
}
