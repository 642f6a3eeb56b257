package scheduler

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// HolderConfig configures a Holder. Only Requests is required.
type HolderConfig struct {
	// Requests returns the slots that a job holds while it runs, for example Exports.For(tenant), or none. It may also
	// return requests for limits of other kinds: the call takes all or nothing, those tokens stay taken, and each attempt
	// takes them again. An error fails the attempt.
	Requests func(job *rivertype.JobRow) ([]ratelimit.Request, error)
	// MaxSnooze is the longest snooze of a job that found no free slot, because no job is notified when one becomes free.
	// The snooze is a random time of at least half of it, so that waiting jobs don't ask together. A short MaxSnooze costs
	// an update of each waiting job each time, and a long one leaves slots unused: of very short jobs, about one a second
	// runs in each slot by default. Defaults to 2 seconds.
	MaxSnooze time.Duration
	// Logger receives errors that no caller gets: a job that lost its slot and continued to its end, at growing intervals
	// of up to a minute. Defaults to slog.Default.
	Logger *slog.Logger
}

const (
	defaultMaxSnooze = 2 * time.Second
	// longestSnooze bounds the snooze of a job that waits for tokens or for the end of a pause, because a rule change may
	// make the wait shorter.
	longestSnooze = time.Hour
)

// Holder makes River jobs hold slots while they run, so that a tenant has at most as many running jobs as slots, on any
// number of workers. It works with or without a Scheduler. It is safe for concurrent use.
type Holder struct {
	limiter *ratelimit.Limiter
	config  HolderConfig
	lost    telemetry.FailureLog
}

// NewHolder returns a Holder for the limiter's slots. It sends nothing to the database. Install its Middleware in every
// River client that works the jobs.
func NewHolder(limiter *ratelimit.Limiter, config HolderConfig) (*Holder, error) {
	if err := guard.CheckLimiter(limiter); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidConfig, err)
	}
	switch {
	case config.Requests == nil:
		return nil, fmt.Errorf("%w: Requests is nil; return what a job holds while it runs", ErrInvalidConfig)
	case config.MaxSnooze < 0:
		return nil, fmt.Errorf("%w: MaxSnooze is %v; use a duration above 0, or 0 for the default", ErrInvalidConfig,
			config.MaxSnooze)
	}
	config.MaxSnooze = cmp.Or(config.MaxSnooze, defaultMaxSnooze)
	config.Logger = cmp.Or(config.Logger, slog.Default())
	return &Holder{limiter: limiter, config: config}, nil
}

// Middleware returns the element for river.Config.Middleware of the clients that work the jobs. It goes before the
// middleware of a Scheduler, where Install puts it:
//
//	err := sched.Install(config, holder)
//
// Then a job first gets its slot and then uses its reserved turn. A job whose turn becomes stale while it waits for a
// slot reserves again. In the other order waiting jobs would use up their turns, and reach the upstream together.
//
// A job runs if one call acquired all its requests. The context of Work then has the lease
// ([ratelimit.LeaseFromContext]); use its Fence for writes to other systems. The lease is renewed while the job runs,
// and released when the job ends, also by a panic or a cancellation. A job that was refused, or that met contention, is
// snoozed and loses no attempt. Other errors fail the attempt, and the job does not run.
//
// If a job loses its lease, its context ends with the cause [ratelimit.ErrLeaseLost], and the job must stop. Its error
// wraps that cause, and River retries it. If the process is killed, its slot is free when the lease ends; River finds
// such jobs after RescueStuckJobsAfter.
func (h *Holder) Middleware() rivertype.Middleware { return &holding{holder: h} }

// holding is a Holder as River sees it.
type holding struct {
	river.MiddlewareDefaults

	holder *Holder
}

var _ rivertype.WorkerMiddleware = (*holding)(nil)

// Work runs a job while holding the slots of its requests.
func (m *holding) Work(ctx context.Context, job *rivertype.JobRow, work func(context.Context) error) error {
	h := m.holder
	requests, err := requestsFor(job, h.config.Requests)
	if err != nil {
		return fmt.Errorf("scheduler: hold: %w", err)
	}
	if len(requests) == 0 {
		return work(ctx)
	}
	deciding, cancel := guard.Deciding(ctx, decideTimeout) // or a client that stops would leave slots held
	defer cancel()
	lease, err := guard.Take(deciding, h.limiter, requests)
	switch {
	case isInTheWay(ctx, err):
		return river.JobSnooze(h.snooze(h.config.MaxSnooze))
	case err != nil:
		return fmt.Errorf("scheduler: hold: %w", err)
	case !lease.Allowed:
		return river.JobSnooze(h.wait(lease.Decision))
	}
	held, release := h.limiter.KeepAlive(ctx, lease)
	defer release()
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("scheduler: hold: %w", err)
	}
	err = work(held)
	release()
	return h.ended(ctx, held, job, err)
}

// isInTheWay reports whether err says that others were, so that the same call may succeed a little later.
func isInTheWay(ctx context.Context, err error) bool {
	return ratelimit.IsRetryable(err) || errors.Is(err, ratelimit.ErrContended) ||
		errors.Is(err, ratelimit.ErrOverloaded) ||
		errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil // decideTimeout, or the limiter's
}

// ended returns the error to report to River for a job that has returned err. A job that succeeded although its lease
// was lost is not an error, because River would run it again and do its work twice.
func (h *Holder) ended(ctx, held context.Context, job *rivertype.JobRow, err error) error {
	lost := context.Cause(held)
	if !errors.Is(lost, ratelimit.ErrLeaseLost) {
		h.lost.Worked(ctx, h.config.Logger, "scheduler: jobs keep their slots again")
		return err
	}
	var snoozed *rivertype.JobSnoozeError
	var cancelled *rivertype.JobCancelError
	switch {
	case err == nil, errors.As(err, &snoozed), errors.As(err, &cancelled):
		h.lost.Failed(ctx, h.config.Logger, slog.LevelWarn, "scheduler: a job lost its slot and went on to its end", lost,
			slog.Int64("job_id", job.ID))
		return err
	}
	return fmt.Errorf("scheduler: hold: %w: %w", lost, err)
}

// wait returns the snooze of a refused job: about the time until its tokens arrive. If only slots are missing, it is at
// most MaxSnooze, because slots become free without notice.
func (h *Holder) wait(d ratelimit.Decision) time.Duration {
	var slots, others time.Duration
	for i := range d.States {
		switch s := &d.States[i]; {
		case !telemetry.Refuses(s):
		case guard.IsHeld(s.Limit) && s.PausedUntil.IsZero():
			slots = max(slots, s.RetryAfter)
		default:
			others = max(others, s.RetryAfter)
		}
	}
	if slots > 0 {
		slots = h.snooze(min(slots, h.config.MaxSnooze))
	}
	if others > 0 {
		others = min(others, longestSnooze) + ratelimit.Jitter(h.config.MaxSnooze)
	}
	return max(slots, others) + time.Millisecond // River's clock and its rounding are not the database's
}

// snooze returns a random span from half of most to most.
func (h *Holder) snooze(most time.Duration) time.Duration {
	return most - ratelimit.Jitter(most/2)
}
