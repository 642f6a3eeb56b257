package ratelimit

import "context"

// Require takes what the requests cost from all of their limits and returns nil, or takes from none of them and returns an
// error: work goes on after nil, and after nothing else. It is [Limiter.Take] for whoever needs no more of the decision than
// that, and begin with it, as a Take whose Allowed is not looked at lets everybody through, in silence.
//
//	if err := limiter.WithTx(tx).Require(ctx, SendMessage.For(userID)); err != nil {
//		return err // refused or failed: the transaction rolls back, and nothing is taken
//	}
//
// A refusal is a *[LimitedError], which [errors.As] finds, and has the Decision: which limits refused, and when to come back.
// errors.Is(err, [ErrLimited]) tells it from a failure. Every other error is a failure as Take's are, and lets nothing through
// either; [IsUndecided] is true of it.
//
// A limit that is tried in [Shadow] refuses nobody, and neither does a call that [WithShadow] marks: where that is all that
// refuses, Require returns nil, has taken nothing from the limits that refused (and with WithShadow from none), and Observers
// are told of the refusal. A failure is an error all the same.
func (l *Limiter) Require(ctx context.Context, requests ...Request) error {
	d, err := l.Take(ctx, requests...)
	if err != nil {
		return err
	}
	if inShadow(ctx) {
		return nil
	}
	return d.Err()
}
