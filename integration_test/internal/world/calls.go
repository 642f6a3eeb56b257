package world

import (
	"context"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Call is a call that needs the database, with a request, or with the ID of a reservation that took from its bucket.
type Call func(ctx context.Context, l *ratelimit.Limiter, id string, r ratelimit.Request) error

// Calls has each method of Limiter that reads or writes rows of tokens, and TakeSeveral.
func Calls() map[string]Call {
	other := ratelimit.Define("other", Hoard(1e6))
	return map[string]Call{
		"Take":         asking((*ratelimit.Limiter).Take),
		"Check":        asking((*ratelimit.Limiter).Check),
		"Reserve":      asking((*ratelimit.Limiter).Reserve),
		"CheckReserve": asking((*ratelimit.Limiter).CheckReserve),
		"Require":      changing((*ratelimit.Limiter).Require),
		"Reset":        changing((*ratelimit.Limiter).Reset),
		"Credit":       changing((*ratelimit.Limiter).Credit),
		"Charge":       changing((*ratelimit.Limiter).Charge),
		"Start":        naming((*ratelimit.Limiter).Start),
		"Started":      naming((*ratelimit.Limiter).Started),
		"Renew":        naming((*ratelimit.Limiter).Renew),
		"Cancel": func(ctx context.Context, l *ratelimit.Limiter, id string, _ ratelimit.Request) error {
			return l.Cancel(ctx, id)
		},
		"Settle": func(ctx context.Context, l *ratelimit.Limiter, id string, r ratelimit.Request) error {
			return l.Settle(ctx, id, r.Cost(9))
		},
		"TakeUpTo": func(ctx context.Context, l *ratelimit.Limiter, _ string, r ratelimit.Request) error {
			_, _, err := l.TakeUpTo(ctx, 3, r)
			return err
		},
		"TakeSeveral": func(ctx context.Context, l *ratelimit.Limiter, _ string, r ratelimit.Request) error {
			return errOf(l.Take(ctx, r, other.For("free")))
		},
		"CreditTaken": func(ctx context.Context, l *ratelimit.Limiter, _ string, r ratelimit.Request) error {
			return l.CreditTaken(ctx, time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC), r)
		},
		"Value": func(ctx context.Context, l *ratelimit.Limiter, _ string, r ratelimit.Request) error {
			return errOf(l.Value(ctx, r))
		},
		"Prune": func(ctx context.Context, l *ratelimit.Limiter, _ string, r ratelimit.Request) error {
			return errOf(l.Prune(ctx, r.Limit()))
		},
		"Expire": func(ctx context.Context, l *ratelimit.Limiter, _ string, _ ratelimit.Request) error {
			return errOf(l.Expire(ctx))
		},
	}
}

func asking[T any](verb func(*ratelimit.Limiter, context.Context, ...ratelimit.Request) (T, error)) Call {
	return func(ctx context.Context, l *ratelimit.Limiter, _ string, r ratelimit.Request) error {
		return errOf(verb(l, ctx, r))
	}
}

func changing(verb func(*ratelimit.Limiter, context.Context, ...ratelimit.Request) error) Call {
	return func(ctx context.Context, l *ratelimit.Limiter, _ string, r ratelimit.Request) error {
		return verb(l, ctx, r)
	}
}

func naming[T any](verb func(*ratelimit.Limiter, context.Context, string) (T, error)) Call {
	return func(ctx context.Context, l *ratelimit.Limiter, id string, _ ratelimit.Request) error {
		return errOf(verb(l, ctx, id))
	}
}

// errOf returns the error of a call that also returns an answer.
func errOf[T any](_ T, err error) error { return err }
