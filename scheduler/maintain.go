package scheduler

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/pgratelimit/internal/engine/reserved"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Maintained is the result of a call of Maintain.
type Maintained struct {
	// Ended is the number of reservations that Maintain ended because their job had ended.
	Ended int
	// Unguarded is how many of these jobs completed although their turn was never started. They ran on a client without
	// the middleware, at the time of River's schedule.
	Unguarded int
	// Expired is the number of reservations that ended by Config.ExpireAfter of the Limiter.
	Expired int
}

const (
	// lookBack is how far back the first Maintain of a process looks for jobs that ended.
	lookBack = 25 * time.Hour
	// overlap is how much of that time is looked at again the next time, for transactions that took long to
	// commit and for clocks that disagree.
	overlap = 10 * time.Minute
	// maintainBatch and maxBatches bound the reservations that one call ends.
	maintainBatch = 500
	maxBatches    = 200
	// maxFailures is how many jobs may fail until a call gives up: by then it is the database that does. Jobs that are
	// passed over because their bucket has made another one fail do not count.
	maxFailures = 100
)

// Maintain ends the reservations of jobs whose end the middleware did not see. These were cancelled through River's own
// API, discarded by its rescuer, panicked in the last attempt, or ended while their process was killed. It also calls
// [ratelimit.Limiter.Expire]. Call it every minute or so from one process or several, or let River call it: see
// Install.
//
// If a reservation cannot be ended, Maintain still ends the others. It returns the joined errors with the result, and
// tries again at the next call. It waits at most a second for a bucket whose row another transaction has locked, and
// then leaves the other reservations of that bucket to the next call.
func (s *Scheduler) Maintain(ctx context.Context, client *river.Client[pgx.Tx]) (Maintained, error) {
	var done Maintained
	if err := checkCall(ctx, "maintain", client); err != nil {
		return done, err
	}
	begun := time.Now()
	s.mu.Lock()
	since := s.swept
	s.mu.Unlock()
	if since.IsZero() {
		since = begun.Add(overlap - lookBack)
	}
	since = since.Add(-overlap)

	sweeping, failed := reserved.Sweeping(ctx), make(failures)
	var err error
	if done.Unguarded, err = s.sweep(sweeping, client, since, failed, " AND r.started_us IS NULL",
		rivertype.JobStateCompleted); err == nil {
		done.Ended, err = s.sweep(sweeping, client, since, failed, "", rivertype.JobStateCompleted,
			rivertype.JobStateCancelled, rivertype.JobStateDiscarded)
	}
	done.Ended += done.Unguarded
	if done.Unguarded > 0 {
		s.config.Logger.WarnContext(ctx, "scheduler: jobs ran without waiting for their turns: a client that works them "+
			"lacks the middleware",
			slog.Int("jobs", done.Unguarded))
	}
	isSwept := err == nil && len(failed) == 0
	errs := append(failed.causes(), err)
	if ctx.Err() == nil {
		done.Expired, err = s.limiter.Expire(ctx) // an error if row level security hides reservations
		errs, isSwept = append(errs, err), isSwept && err == nil
	}
	if isSwept { // else the next call has to look as far back
		s.mu.Lock()
		s.swept = begun
		s.mu.Unlock()
	}
	return done, errors.Join(errs...)
}

// failures are the jobs whose reservation could not be ended, by their ID.
type failures map[int64]error

// causes returns the errors of the failures, without the jobs that were passed over.
func (f failures) causes() (errs []error) {
	for _, err := range f {
		if !errors.Is(err, reserved.ErrStuck) {
			errs = append(errs, err)
		}
	}
	return errs
}

// errGaveUp is the error of a sweep that ended early.
var errGaveUp = errors.New("scheduler: maintain: gave up: too many reservations cannot be ended, or the time is over")

// sweep ends the reservations that are open although their job ended in one of the states after since.
// which narrows them down by a condition on their row r. Jobs whose reservation cannot be ended are added to failed,
// and passed over when they are there already.
func (s *Scheduler) sweep(ctx context.Context, client *river.Client[pgx.Tx], since time.Time, failed failures,
	which string, states ...rivertype.JobState,
) (int, error) {
	where := `finalized_at >= @ended_since AND EXISTS (
		SELECT FROM ` + pgx.Identifier{s.limiter.Schema(), "reservations"}.Sanitize() + ` AS r
		WHERE r.state = 'open'` + which + ` AND r.id = CASE
			WHEN metadata ->> @reservation_key ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' THEN (metadata ->> @reservation_key)::uuid END)`
	params := river.NewJobListParams().States(states...).First(maintainBatch).
		OrderBy(river.JobListOrderByFinalizedAt, river.SortOrderAsc).
		Where(where, river.NamedArgs{"ended_since": since, "reservation_key": s.key})
	ended := 0
	for range maxBatches {
		found, err := client.JobList(ctx, params)
		if err != nil {
			return ended, fmt.Errorf("scheduler: maintain: list jobs that ended: %w", err)
		}
		for _, job := range found.Jobs {
			if failed[job.ID] != nil {
				continue
			}
			if err := s.endOf(ctx, job); err != nil {
				failed[job.ID] = fmt.Errorf("scheduler: maintain: job %d: %w", job.ID, err)
				if ctx.Err() != nil || len(failed.causes()) >= maxFailures {
					return ended, errGaveUp
				}
				continue
			}
			ended++
		}
		if len(found.Jobs) < maintainBatch {
			break
		}
		params = params.After(found.LastCursor)
	}
	return ended, nil
}

func (s *Scheduler) endOf(ctx context.Context, job *rivertype.JobRow) error {
	id := s.reservationOf(job)
	switch job.State {
	case rivertype.JobStateCancelled:
		return s.endFailed(ctx, s.limiter, id, s.config.Cancelled)
	case rivertype.JobStateDiscarded:
		return s.endFailed(ctx, s.limiter, id, s.config.Discarded)
	default:
		return s.end(ctx, s.limiter, id, KeepEstimate)
	}
}

// maintainArgs are the args of the River job that calls Maintain.
type maintainArgs struct{}

// Kind returns "ratelimit_maintain".
func (maintainArgs) Kind() string { return "ratelimit_maintain" }

// requestsFor returns what a job costs or holds by a function of the program, which isn't asked about Maintain's job.
func requestsFor(job *rivertype.JobRow,
	requests func(*rivertype.JobRow) ([]ratelimit.Request, error),
) ([]ratelimit.Request, error) {
	if requests == nil || job.Kind == (maintainArgs{}).Kind() {
		return nil, nil
	}
	return requests(job)
}

// maintainEvery is how often a client that Install has configured calls Maintain.
const maintainEvery = time.Minute

// periodicJob returns the element of river.Config.PeriodicJobs that has Maintain called.
func periodicJob(queue string) *river.PeriodicJob {
	return river.NewPeriodicJob(river.PeriodicInterval(maintainEvery), func() (river.JobArgs, *river.InsertOpts) {
		return maintainArgs{}, &river.InsertOpts{MaxAttempts: 1, Queue: queue} // the next job does the rest
	}, &river.PeriodicJobOpts{RunOnStart: true})
}

// worker returns the worker for the jobs of periodicJob.
func (s *Scheduler) worker() river.Worker[maintainArgs] {
	return river.WorkFunc(func(ctx context.Context, _ *river.Job[maintainArgs]) error {
		client, err := river.ClientFromContextSafely[pgx.Tx](ctx)
		if err != nil {
			return err
		}
		_, err = s.Maintain(ctx, client)
		return err
	})
}
