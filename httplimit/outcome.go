package httplimit

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Result is what became of a request, or of what it took. Its text is meant for the label of a metric.
type Result string

// The results. A request has one of the first eight, and may have some of the last three later; a rule in
// shadow mode has one of its own.
const (
	// Allowed is a request that every rule had enough for.
	Allowed Result = "allowed"
	// Refused is a request that some rule had not enough for.
	Refused Result = "refused"
	// BadKey is a request that does not say who it is from, or not so that it can be relied on.
	BadKey Result = "bad_key"
	// BadCost is a request whose cost is no number that can be taken.
	BadCost Result = "bad_cost"
	// TooCostly is a request that costs more than a limit can ever hold.
	TooCostly Result = "too_costly"
	// FailedClosed is a request that was not decided, and so was not let through.
	FailedClosed Result = "failed_closed"
	// FailedOpen is a request that was not decided, and was let through.
	FailedOpen Result = "failed_open"
	// Cancelled is a request that ended before it was decided: its client went away, or its time was up.
	Cancelled Result = "cancelled"
	// Refunded is what a request took and got back by the status of its response.
	Refunded Result = "refunded"
	// RefundFailed is what it should have got back, and may not have.
	RefundFailed Result = "refund_failed"
	// LeaseLost is a request whose handler lost the slot that it held, and that somebody else may have had beside it since.
	LeaseLost Result = "lease_lost"
)

// Outcome is what Config.Observe is told. It holds no key, as long as the errors of your own functions
// hold none.
type Outcome struct {
	// Result is what happened.
	Result Result
	// Shadow is whether it only would have happened: it says nothing about the response.
	Shadow bool
	// Limits names the limits it is about: those that refused, those that could not be asked, those refunded;
	// all of the call when it was allowed or failed.
	Limits []string
	// Decision is the decision, when there is one.
	Decision ratelimit.Decision
	// Err is why it failed. errors.Is(Err, ratelimit.ErrContended) tells contention from a store that does
	// not work.
	Err error
	// Elapsed is how long the decision took, or the refund.
	Elapsed time.Duration
}

// String returns the result, and "shadow_" before it for a rule that is not enforced.
func (o Outcome) String() string {
	if o.Shadow {
		return "shadow_" + string(o.Result)
	}
	return string(o.Result)
}

// tell reports an outcome to the observers, and to the log when something does not work.
func (m *middleware) tell(ctx context.Context, o Outcome) {
	switch o.Result {
	case FailedOpen, FailedClosed, RefundFailed, LeaseLost:
		m.log.failure(ctx, o)
	default: // not a fault of this side
	}
	answered := ratelimit.Answered{Route: m.config.Route, Result: string(o.Result), Shadow: o.Shadow, Err: o.Err}
	if len(o.Limits) > 0 {
		answered.Limit = o.Limits[0]
	}
	m.limiter.Observe(ctx, answered)
	if m.config.Observe != nil {
		m.config.Observe(ctx, o)
	}
}

// logEvery is the least time between two lines about failures: under load there is one a request.
const logEvery = time.Second

// failureLog writes about failures, and counts those it leaves out.
type failureLog struct {
	logger *slog.Logger

	mu      sync.Mutex
	next    time.Time
	omitted int
}

func (l *failureLog) failure(ctx context.Context, o Outcome) {
	omitted, ok := l.due(time.Now())
	if !ok {
		return
	}
	message := "rate limits are not decided"
	switch o.Result {
	case RefundFailed:
		message = "rate limit refund failed"
	case LeaseLost:
		message = "a handler lost the slot that it held"
	default:
	}
	l.logger.ErrorContext(ctx, message, "result", o.String(), "limits", o.Limits, "error", telemetry.ErrorText(o.Err),
		"contended", errors.Is(o.Err, ratelimit.ErrContended), "elapsed", o.Elapsed, "omitted", omitted)
}

// due reports whether a line may be written at now, and how many were left out before it.
func (l *failureLog) due(now time.Time) (omitted int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Before(l.next) {
		l.omitted++
		return 0, false
	}
	omitted, l.omitted = l.omitted, 0
	l.next = now.Add(logEvery)
	return omitted, true
}
