package httplimit

import (
	"context"
	"log/slog"

	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// tell reports an answer to the limiter's Observer, and a failure to the log, too.
func (m *middleware) tell(ctx context.Context, a ratelimit.Answered) {
	a.Route = m.config.Route
	switch a.Result {
	case guard.FailedOpen, guard.FailedClosed, guard.CreditFailed, guard.LeaseLost:
		logFailure(ctx, &m.failures, m.config.Logger, a)
	case guard.Allowed, guard.Refused:
		m.failures.Worked(ctx, m.config.Logger, "rate limits are decided again")
	}
	m.limiter.Observe(ctx, a)
}

// logFailure writes about a failure.
func logFailure(ctx context.Context, log *telemetry.FailureLog, logger *slog.Logger, a ratelimit.Answered) {
	message := "rate limits are not decided"
	switch a.Result {
	case guard.CreditFailed:
		message = "rate limit credit failed"
	case guard.LeaseLost:
		message = "a handler lost the slot that it held"
	}
	log.Failed(ctx, logger, slog.LevelError, message, a.Err,
		slog.String("result", telemetry.Answer(a)), slog.String("route", a.Route), slog.String("limit", a.Limit))
}
