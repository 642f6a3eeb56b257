package httplimit

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// tell reports an answer to the limiter's Observer, and a failure to the log, too.
func (m *middleware) tell(ctx context.Context, a ratelimit.Answered) {
	switch a.Result {
	case guard.FailedOpen, guard.FailedClosed, guard.CreditFailed, guard.LeaseLost:
		m.log.failure(ctx, a)
	}
	a.Route = m.config.Route
	m.limiter.Observe(ctx, a)
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

func (l *failureLog) failure(ctx context.Context, a ratelimit.Answered) {
	omitted, ok := l.due(time.Now())
	if !ok {
		return
	}
	message := "rate limits are not decided"
	switch a.Result {
	case guard.CreditFailed:
		message = "rate limit credit failed"
	case guard.LeaseLost:
		message = "a handler lost the slot that it held"
	}
	l.logger.ErrorContext(ctx, message, "result", telemetry.Answer(a), "limit", a.Limit, "error", telemetry.ErrorText(a.Err),
		"contended", errors.Is(a.Err, ratelimit.ErrContended), "omitted", omitted)
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
