package ratelimit

import (
	"context"

	"github.com/pgratelimit/pgratelimit/internal/batch"
)

// bounded returns ctx with the time that Config.Timeout leaves a call outside a transaction.
func (l *Limiter) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if l == nil || l.pool == nil || !batch.Bounds(ctx, l.config.Timeout) {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, l.config.Timeout)
}
