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
	// Hold is how early a worker may take up a job to wait for its moment itself, occupying one of the
	// queue's MaxWorkers meanwhile. With a Hold a little above FetchPollInterval a job starts within
	// milliseconds of its moment. Defaults to 0: a job waits in the database and starts when a worker next
	// polls, at most FetchPollInterval late. At most 5 seconds.
	Hold time.Duration
	// Logger gets what no caller is there to be told: a reservation that could not be settled after its job
	// had succeeded, jobs found to have run unguarded. Defaults to slog.Default.
	Logger *slog.Logger
}

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
	return c
}

func (c Config) validate() error {
	for _, u := range []Unused{c.Cancelled, c.Discarded} {
		if u != KeepEstimate && u != GiveBack {
			return fmt.Errorf("%w: %d is neither KeepEstimate nor GiveBack", ErrInvalidConfig, u)
		}
	}
	if c.Hold < 0 || c.Hold > riverInterval {
		return fmt.Errorf("%w: Hold is %v; use a span up to %v, or 0", ErrInvalidConfig, c.Hold, riverInterval)
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

// New returns a Scheduler for the reservations of limiter. It sends nothing to the database. Install its
// Middleware in every River client that inserts or works its jobs.
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
// jobs of this Scheduler. Jobs that Enqueue did not insert pass through it untouched.
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
