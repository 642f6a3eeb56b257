package httplimit

import (
	"context"
	"errors"
	"net/http"

	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// Respond answers a request as the middleware does, if err says so, and reports whether it did. Use it in handlers that
// take tokens themselves, for example in the transaction of their writes.
//
//	err := limiter.InTx(r.Context(), func(tx pgx.Tx) error {
//		if err := limiter.WithTx(tx).Require(r.Context(), Messages.For(author)); err != nil {
//			return err
//		}
//		return insert(r.Context(), tx, author, text)
//	})
//	if httplimit.Respond(w, r, err) {
//		return
//	}
//	if err != nil {
//		http.Error(w, "the message was not sent", http.StatusInternalServerError)
//		return
//	}
//
// The answers:
//
//   - 429: a refusal, a *[ratelimit.LimitedError] from Require, Decision.Err or Hold, whatever other errors are joined
//     to it. Its fields are merged with those of the middlewares around the handler (see [Merge]), with the longest
//     Retry-After.
//   - 503 with Retry-After, even with FailOpen: a failure for which [ratelimit.IsUndecided] is true, and a context's
//     error if the request's context has ended.
//   - 400 for an invalid key or cost, and 413 for a cost above the limit's capacity, whatever failures are joined to
//     it.
//
// Don't call it once the response has begun, because the answer would be added to the body. It doesn't answer nil and
// other errors: your own code's from InTx, errors about a reservation's ID, and ratelimit.ErrCommitUnknown, even joined
// to a failure, because the work may be done. It uses the surrounding middleware's Config.Refuse and RetryJitter, and
// its Config.Logger for failures, or slog.Default.
func Respond(w http.ResponseWriter, r *http.Request, err error) (answered bool) {
	config := Config{}.withDefaults()
	admission, around := FromContext(r.Context())
	if around {
		config = admission.middleware.config
	}
	var limited *ratelimit.LimitedError
	if errors.As(err, &limited) {
		d := limited.Decision
		Merge(w, r, d)
		m := &middleware{config: config}
		refusal := newRefusal(d, m.jitter(nil, d.RetryAfter))
		refusal.waitFor(waitFor(w.Header(), refusal.RetryAfter))
		refuseWith(w, r, refusal, config.Refuse)
		return true
	}
	result, fails := failureOf(r.Context(), err)
	if fails {
		if result == guard.FailedClosed {
			gate := &apart
			if around {
				gate = admission.middleware.gate
			}
			gate.Log(r.Context(), event.Answered{Result: result, Err: err})
		}
		refuseWith(w, r, (&fault{result: result, err: err}).refusal(), config.Refuse)
	}
	return fails
}

// apart throttles the log of Respond in handlers without a middleware around them.
var apart guard.Gate //nolint:gochecknoglobals // such a handler has nothing that lives longer than a request

// failureOf returns what a failure makes of a request, and false for an error that is not one of a call on limits. ctx
// is the request's.
func failureOf(ctx context.Context, err error) (result string, fails bool) {
	if result, ofRequest := requestFault(err); ofRequest {
		return result, true
	}
	isOfContext := errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
	switch {
	case errors.Is(err, ratelimit.ErrCommitUnknown):
		return "", false
	case ratelimit.IsUndecided(err), ctx.Err() != nil && isOfContext:
		return guard.Result(ctx, err, false), true
	}
	return "", false
}
