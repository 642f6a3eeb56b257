package ratelimit

import "context"

// Require takes the costs of the requests from all of their limits and returns nil, or takes from none of them and returns an
// error. Begin with it: a program that ignores the Allowed of a Take admits every request without notice. Continue only if the
// error is nil.
//
//	if err := limiter.WithTx(tx).Require(ctx, SendMessage.For(userID)); err != nil {
//		return err // refused or failed: the transaction rolls back, and nothing is taken
//	}
//
// A refusal is a *[LimitedError], which [errors.As] finds. It has the Decision: the limits that refused, and the time to wait.
// errors.Is(err, [ErrLimited]) distinguishes it from a failure. Every other error is a failure, as from Take, and [IsUndecided]
// is true for it.
//
// A limit in [Shadow] mode refuses no request. If no other limit refuses, Require returns nil, and Observers receive the refusal.
// Limits in Shadow that refused give no tokens. A failure is still an error.
func (l *Limiter) Require(ctx context.Context, requests ...Request) error {
	d, err := l.Take(ctx, requests...)
	if err != nil {
		return err
	}
	return d.Err()
}
