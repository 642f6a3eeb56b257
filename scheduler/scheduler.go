package scheduler

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Unused is what becomes of the tokens of a job that was started and then ended without success. Those of a
// job that was never started always go back.
type Unused int

const (
	// KeepEstimate leaves the tokens taken: the work may have used them before it failed.
	KeepEstimate Unused = iota
	// GiveBack returns the tokens to the limits, as [ratelimit.Limiter.Cancel] does.
	GiveBack
)

// Config is how a Scheduler works. The zero Config is ready for use.
type Config struct {
	// Cancelled is what becomes of the tokens of a job that was cancelled after it was started. Defaults to
	// KeepEstimate.
	Cancelled Unused
	// Discarded is what becomes of the tokens of a job whose last attempt failed. Defaults to KeepEstimate.
	Discarded Unused
	// RetriesPay makes every further attempt of a job reserve again what the job cost, and wait for it.
	// A snooze is no attempt, and neither is one that a client that was stopped cut off. Defaults to false: a job
	// pays once, however often River tries it.
	RetriesPay bool
	// TakeUpEarly is how long before its turn a worker may take up a job. The worker then waits for the turn itself, and
	// occupies one of the queue's MaxWorkers meanwhile. If TakeUpEarly is a little above FetchPollInterval, a job starts
	// within milliseconds of its turn. Defaults to 1.3 seconds, which is a little above River's default poll. Below 0 a job
	// waits in the database and starts when a worker next polls, at most FetchPollInterval late. At most 5 seconds.
	TakeUpEarly time.Duration
	// Requests returns what a job costs that was inserted without Enqueue, so that jobs of programs that do not know of limits
	// are paced, for each tenant say; none is for a job that costs nothing. When a worker first comes to the job, it reserves that,
	// in the order in which jobs are come to, and puts the job off until its moment comes up: once, whatever the queue, and
	// no attempt is lost; where the reservation is refused, as with a MaxReserved, it is put off and asks again. From then on the job is as
	// one of Enqueue: set RetriesPay where each attempt uses what the limit is for, and [ratelimit.Config] StaleAfter. An error fails the attempt. A worker that is killed just then
	// leaves a reservation without a job, which stays until it expires, and the job reserves again.
	// Defaults to nil: jobs without a reservation run as they come.
	Requests func(job *rivertype.JobRow) ([]ratelimit.Request, error)
	// Logger gets what no caller is there to be told: a reservation that could not be settled after its job
	// had succeeded, jobs found to have run unguarded. Defaults to slog.Default.
	Logger *slog.Logger
}

// defaultTakeUp is a little above how often River looks for jobs by default.
const defaultTakeUp = 1300 * time.Millisecond

// riverInterval is how often River moves scheduled jobs that are due by the next time to available. Work that
// is due sooner is inserted as available, since nobody would look at it in time.
const riverInterval = 5 * time.Second

// endTimeout bounds what is written about a reservation when its job has ended, perhaps because its
// context did.
const endTimeout = 5 * time.Second

func (c Config) withDefaults() Config {
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.TakeUpEarly == 0 {
		c.TakeUpEarly = defaultTakeUp
	}
	return c
}

// takeUpEarly returns how long before its turn a worker may take up a job.
func (s *Scheduler) takeUpEarly() time.Duration { return max(s.config.TakeUpEarly, 0) }

func (c Config) validate() error {
	for _, u := range []Unused{c.Cancelled, c.Discarded} {
		if u != KeepEstimate && u != GiveBack {
			return fmt.Errorf("%w: %d is neither KeepEstimate nor GiveBack", ErrInvalidConfig, u)
		}
	}
	if c.TakeUpEarly > riverInterval {
		return fmt.Errorf("%w: TakeUpEarly is %v; use a span up to %v, 0 for the default, or less for none", ErrInvalidConfig, c.TakeUpEarly, riverInterval)
	}
	return nil
}

// Scheduler ties River jobs to reservations of a Limiter. It is safe for concurrent use.
type Scheduler struct {
	limiter *ratelimit.Limiter
	config  Config
	key     string // under which a job's metadata holds its reservation's ID

	mu    sync.Mutex
	swept time.Time // up to when Maintain has looked at the jobs that ended
}

// New returns a Scheduler for the reservations of limiter. It sends nothing to the database. Install it in every River
// client that inserts or works its jobs.
func New(limiter *ratelimit.Limiter, config Config) (*Scheduler, error) {
	if limiter == nil {
		return nil, fmt.Errorf("%w: the limiter is nil; pass what ratelimit.New returned", ErrInvalidConfig)
	}
	if limiter.InTransaction() {
		return nil, fmt.Errorf("%w: the limiter is bound to a transaction by WithTx; pass what ratelimit.New returned", ErrInvalidConfig)
	}
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	return &Scheduler{limiter: limiter, config: config, key: metadataKey(limiter.Schema())}, nil
}

// Middleware returns what goes into river.Config.Middleware, first, of every client that inserts or works
// jobs of this Scheduler; Install puts it there. Jobs that Enqueue did not insert pass through it untouched, unless
// Config.Requests says what they cost.
func (s *Scheduler) Middleware() rivertype.Middleware { return &middleware{scheduler: s} }

// end ends the reservation of a job that will not run again. One that has ended otherwise, or is
// forgotten, stays as it is.
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

// endFailed is end for a job that was cancelled or discarded: what it took goes back when it was never
// started, whatever River counts as an attempt, and else follows unused.
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
