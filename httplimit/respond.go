package httplimit

import (
	"context"
	"errors"
	"log/slog"
	"net/http"

	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Respond answers a request by an error from a call on limits, as the middleware answers its own, and reports whether it
// has: for handlers that take by themselves, as in the transaction of their writes.
//
//		err := limiter.InTx(r.Context(), func(tx pgx.Tx) error {
//			if err := limiter.WithTx(tx).Require(r.Context(), Messages.For(author)); err != nil {
//				return err
//			}
//			return insert(r.Context(), tx, author, text)
//		})
//		if httplimit.Respond(w, r, err) {
//			return
//		}
//		if err != nil {
//			http.Error(w, "the message was not sent", http.StatusInternalServerError)
//			return
//		}
//
//	  - A refusal, a *[ratelimit.LimitedError] from Require, Decision.Err or Hold, is 429: its fields beside those of the
//	    middlewares around the handler (see [Merge]), the longest Retry-After, and the body.
//	  - A failure, of which [ratelimit.IsUndecided] is true, is 503 with Retry-After, and closed: there is no FailOpen for a transaction,
//	    which is over. So is an error of a context, where that of the request has ended.
//	  - A key, or a cost, that cannot be taken is 400, and a cost above what the limit can ever hold 413.
//
// Nil and every other error is not answered, and the handler goes on: an error of its own code that InTx returned, what calls on
// reservations say of an ID, and ratelimit.ErrCommitUnknown, after which the work may be done, so that to try again could do
// it twice. Config.Refuse and RetryJitter are those of the middleware around the handler, where there is one. A failure is logged, as the
// client is not told of what it is: to Config.Logger of that middleware, at most a line a second, or else to slog.Default.
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
			logFailure(r.Context(), admission, err)
		}
		refuseWith(w, r, (&fault{result: result, err: err}).refusal(), config.Refuse)
	}
	return fails
}

// logFailure logs why a handler's own limits are not decided.
func logFailure(ctx context.Context, around *Admission, err error) {
	log := &failureLog{logger: slog.Default()}
	if around != nil && around.middleware != nil {
		log = &around.middleware.log
	}
	log.failure(ctx, ratelimit.Answered{Result: guard.FailedClosed, Err: err})
}

// failureOf returns what a failure makes of a request, and false for an error that is not one of a call on limits. ctx is the
// request's.
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
