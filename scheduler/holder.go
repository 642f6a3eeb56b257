package scheduler

import (
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

// HolderConfig is what jobs hold while they run. Only Requests has to be set.
type HolderConfig struct {
	// Requests returns what a job holds or takes when it runs, as Exports.For(tenant); none is for a job that holds
	// nothing. Beside slots of a [ratelimit.Concurrency] it may take from limits of other kinds, all or nothing: those
	// tokens stay taken, and each attempt of the job takes them again. An error fails the attempt.
	Requests func(job *rivertype.JobRow) ([]ratelimit.Request, error)
	// MaxSnooze is how long at most a job that found no free slot is put off until it asks again. Nobody tells it when
	// a slot becomes free, and RetryAfter only says when at the latest. Each job is put off by at least half of it, at random,
	// so that jobs that wait do not ask together. A short one costs an update of each waiting job each time; a long one leaves
	// slots unused: of jobs that take no time, about one a second runs in each slot. Defaults to 2 seconds.
	MaxSnooze time.Duration
	// Logger gets what no caller is there to be told: a job that lost its slot and went on to its end. Defaults to
	// slog.Default.
	Logger *slog.Logger
}

const (
	defaultMaxSnooze = 2 * time.Second
	// longestSnooze bounds how long a job is put off that waits for tokens, or for the end of a pause: either may come earlier
	// when a rule changes.
	longestSnooze = time.Hour
)

// Holder has River jobs hold slots while they run, so that no tenant has more jobs running at a time than it has slots,
// however many workers there are. It is independent of a Scheduler. It is safe for concurrent use.
type Holder struct {
	limiter *ratelimit.Limiter
	config  HolderConfig
}

// NewHolder returns a Holder for the slots of limiter. It sends nothing to the database. Install its Middleware in every
// River client that works the jobs.
func NewHolder(limiter *ratelimit.Limiter, config HolderConfig) (*Holder, error) {
	switch {
	case limiter == nil:
		return nil, fmt.Errorf("%w: the limiter is nil; pass what ratelimit.New returned", ErrInvalidConfig)
	case limiter.InTransaction():
		return nil, fmt.Errorf("%w: the limiter is bound to a transaction by WithTx; pass what ratelimit.New returned", ErrInvalidConfig)
	case config.Requests == nil:
		return nil, fmt.Errorf("%w: Requests is nil; return what a job holds while it runs", ErrInvalidConfig)
	case config.MaxSnooze < 0:
		return nil, fmt.Errorf("%w: MaxSnooze is %v; use a span above 0, or 0 for the default", ErrInvalidConfig, config.MaxSnooze)
	}
	if config.MaxSnooze == 0 {
		config.MaxSnooze = defaultMaxSnooze
	}
	if config.Logger == nil {
		config.Logger = slog.Default()
	}
	return &Holder{limiter: limiter, config: config}, nil
}

// Middleware returns what goes into river.Config.Middleware of the clients that work the jobs, before that of a Scheduler, as
// Scheduler.Install puts it:
//
//	err := scheduler.Install(config, holder)
//
// Then a job first has its slot and then uses the moment that was reserved, and one that waits for a slot until that moment
// is stale reserves again. In the other order the moment is used up by waiting, and what waited comes to the upstream together.
//
// A job runs when all that it asks for was acquired in one call, and then the context of Work has the lease
// ([ratelimit.LeaseFromContext]), whose Fence goes with what the job writes elsewhere. The lease is renewed while the job
// runs, and released when it has ended, also by a panic, or because it was cancelled. A job that was refused, or that could not
// be decided on because others were in the way, is put off and loses no attempt. Other failures to acquire are the attempt's
// error, and the job does not run.
//
// A job that loses its lease has its context cancelled with the cause [ratelimit.ErrLeaseLost] and has to stop: its error
// wraps that, and River tries it again. When its process is killed, its slot is free when the lease ends; River finds such
// jobs after RescueStuckJobsAfter.
func (h *Holder) Middleware() rivertype.Middleware { return &holding{holder: h} }

// holding is a Holder as River sees it.
type holding struct {
	river.MiddlewareDefaults

	holder *Holder
}

var _ rivertype.WorkerMiddleware = (*holding)(nil)

// Work runs a job while it holds what it asks for.
func (m *holding) Work(ctx context.Context, job *rivertype.JobRow, work func(context.Context) error) error {
	h := m.holder
	requests, err := h.config.Requests(job)
	if err != nil {
		return fmt.Errorf("scheduler: hold: %w", err)
	}
	if len(requests) == 0 {
		return work(ctx)
	}
	lease, err := guard.Take(ctx, h.limiter, requests)
	switch {
	case isInTheWay(ctx, err):
		return river.JobSnooze(h.snooze(h.config.MaxSnooze))
	case err != nil:
		return fmt.Errorf("scheduler: hold: %w", err)
	case !lease.Allowed:
		return river.JobSnooze(h.wait(lease.Decision))
	}
	held, release := h.limiter.Keep(ctx, lease)
	defer release()
	err = work(held)
	release()
	return h.ended(ctx, held, job, err)
}

// isInTheWay reports whether err says that others were, so that the same call may succeed a little later.
func isInTheWay(ctx context.Context, err error) bool {
	return ratelimit.IsRetryable(err) || errors.Is(err, ratelimit.ErrContended) || errors.Is(err, ratelimit.ErrOverloaded) ||
		errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil // the time of the limiter's Config.Timeout
}

// ended returns what River is told of a job that has returned err. One that succeeded although its lease was lost has done
// its work, and running it again would do it twice.
func (h *Holder) ended(ctx, held context.Context, job *rivertype.JobRow, err error) error {
	lost := context.Cause(held)
	if !errors.Is(lost, ratelimit.ErrLeaseLost) {
		return err
	}
	var snoozed *rivertype.JobSnoozeError
	var cancelled *rivertype.JobCancelError
	switch {
	case err == nil, errors.As(err, &snoozed), errors.As(err, &cancelled):
		h.config.Logger.WarnContext(ctx, "scheduler: a job lost its slot and went on to its end",
			slog.Int64("job_id", job.ID), slog.String("error", lost.Error()))
		return err
	}
	return fmt.Errorf("scheduler: hold: %w: %w", lost, err)
}

// wait returns for how long a job is put off that was refused: as long as tokens take to arrive, and no longer than
// MaxSnooze where it is slots that are missing, which become free without notice.
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
		others = min(others, longestSnooze) + ratelimit.Spread(h.config.MaxSnooze)
	}
	return max(slots, others) + time.Millisecond // River's clock and its rounding are not the database's
}

// snooze returns a random span from half of most to most.
func (h *Holder) snooze(most time.Duration) time.Duration {
	return most - ratelimit.Spread(most/2)
}
