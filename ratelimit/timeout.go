package ratelimit

import (
	"context"
	"time"
)

// bounds reports whether a call with ctx is to end after timeout: unless that is not above 0, or ctx ends sooner.
func bounds(ctx context.Context, timeout time.Duration) bool {
	if timeout <= 0 {
		return false
	}
	deadline, ends := ctx.Deadline()
	return !ends || time.Until(deadline) > timeout
}

// bounded returns ctx with the time that Config.Timeout leaves a call outside a transaction.
func (l *Limiter) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if l == nil || l.pool == nil || !bounds(ctx, l.config.Timeout) {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, l.config.Timeout)
}
