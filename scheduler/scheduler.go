package scheduler

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Unused decides about the tokens of a job that was started and ended without success. A job that was never started
// always returns its tokens.
type Unused int

const (
	// KeepEstimate leaves the tokens taken: the work may have used them before it failed.
	KeepEstimate Unused = iota
	// GiveBack returns the tokens to the limits, as [ratelimit.Limiter.Cancel] does.
	GiveBack
)

// Config configures a Scheduler. The zero Config is ready for use.
type Config struct {
	// Cancelled decides about the tokens of a job that was cancelled after it was started. Defaults to KeepEstimate.
	Cancelled Unused
	// Discarded decides about the tokens of a job whose last attempt failed. Defaults to KeepEstimate.
	Discarded Unused
	// RetriesPay makes every further attempt of a job reserve the cost again, and wait for it. A snooze isn't an attempt,
	// nor is an attempt that ended because its client was stopped. Defaults to false: a job pays once.
	RetriesPay bool
	// TakeUpEarly is how long before its turn a worker may take up a job. The worker then waits for the turn itself, and
	// occupies one of the queue's MaxWorkers. If it's a little above FetchPollInterval, a job starts within milliseconds
	// of its turn. Defaults to 1.3 seconds, a little above River's default poll. Below 0 a job waits in the database and
	// starts when a worker next polls, at most FetchPollInterval late. At most 5 seconds.
	TakeUpEarly time.Duration
	// Requests returns the cost of a job that was inserted without Enqueue, so that other programs' jobs are paced, too,
	// or none for a job that costs nothing. The worker that first gets the job reserves the cost, and snoozes the job
	// until its turn, which loses no attempt. If a limit refuses the reservation, the job is snoozed and asks again. From
	// then on it's like a job of Enqueue, so set StaleAfter of [ratelimit.Config], and RetriesPay if each attempt uses the
	// limited resource. An error fails the attempt. If the worker is killed during the reservation, that one stays until
	// it expires, and the job reserves again. A job whose reservation is gone, and whose metadata lack its cost, also
	// reserves what Requests returns. A nil Requests means that jobs without a reservation run immediately.
	Requests func(job *rivertype.JobRow) ([]ratelimit.Request, error)
	// Logger receives errors that no caller gets: a reservation that could not be settled after its job had succeeded, at
	// growing intervals of up to a minute, and jobs that ran without the middleware. Defaults to slog.Default.
	Logger *slog.Logger
}

// defaultTakeUp is a little above how often River looks for jobs by default.
const defaultTakeUp = 1300 * time.Millisecond

// riverInterval is how often River moves scheduled jobs that are due by the next time to available. Work that is due
// sooner is inserted as available, because River would move it too late.
const riverInterval = 5 * time.Second

const (
	// endTimeout is the timeout for ending the reservation of a job that has returned, perhaps because its context has
	// ended.
	endTimeout = 5 * time.Second
	// decideTimeout is the timeout for taking for a job, which goes on if the context of the job ends.
	decideTimeout = 10 * time.Second
)

func (c Config) withDefaults() Config {
	c.Logger = cmp.Or(c.Logger, slog.Default())
	c.TakeUpEarly = max(cmp.Or(c.TakeUpEarly, defaultTakeUp), 0)
	return c
}

func (c Config) validate() error {
	for _, u := range []Unused{c.Cancelled, c.Discarded} {
		if u != KeepEstimate && u != GiveBack {
			return fmt.Errorf("%w: %d is neither KeepEstimate nor GiveBack", ErrInvalidConfig, u)
		}
	}
	if c.TakeUpEarly > riverInterval {
		return fmt.Errorf("%w: TakeUpEarly is %v; use a duration up to %v, 0 for the default, or less for none", ErrInvalidConfig,
			c.TakeUpEarly, riverInterval)
	}
	return nil
}

// Scheduler connects River jobs with reservations of a Limiter. It is safe for concurrent use.
type Scheduler struct {
	limiter *ratelimit.Limiter
	config  Config
	key     string // under which a job's metadata holds its reservation's ID

	failures telemetry.FailureLog

	mu    sync.Mutex
	swept time.Time // up to when Maintain has looked at the jobs that ended
}

// New returns a Scheduler for the limiter's reservations. It sends nothing to the database. Install it in every River
// client that inserts or works its jobs.
func New(limiter *ratelimit.Limiter, config Config) (*Scheduler, error) {
	if err := guard.CheckLimiter(limiter); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidConfig, err)
	}
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	return &Scheduler{limiter: limiter, config: config, key: metadataKey(limiter.Schema())}, nil
}

// Middleware returns the first element for river.Config.Middleware of every client that inserts or works jobs of this
// Scheduler; Install adds it. It does not change jobs that Enqueue did not insert, unless Config.Requests returns their
// cost.
func (s *Scheduler) Middleware() rivertype.Middleware { return &middleware{scheduler: s} }

// end ends the reservation of a job that will not run again. It does nothing if the reservation has ended or does not
// exist.
func (s *Scheduler) end(ctx context.Context, limiter *ratelimit.Limiter, id string, unused Unused) error {
	var err error
	if unused == GiveBack {
		err = limiter.Cancel(ctx, id)
	} else {
		err = limiter.Settle(ctx, id)
	}
	if errors.Is(err, ratelimit.ErrReservationEnded) || errors.Is(err, ratelimit.ErrNotReserved) {
		return nil
	}
	return err
}

// endFailed is end for a job that was cancelled or discarded. If the reservation was never started, its tokens go back,
// however many attempts River counts; otherwise unused decides.
func (s *Scheduler) endFailed(ctx context.Context, limiter *ratelimit.Limiter, id string, unused Unused) error {
	started, err := limiter.Started(ctx, id)
	switch {
	case errors.Is(err, ratelimit.ErrNotReserved):
		return nil
	case err != nil:
		return err
	case !started:
		unused = GiveBack
	}
	return s.end(ctx, limiter, id, unused)
}
