package scheduler

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// middleware is the Scheduler as River sees it.
type middleware struct {
	river.MiddlewareDefaults

	scheduler *Scheduler
}

var (
	_ rivertype.JobInsertMiddleware = (*middleware)(nil)
	_ rivertype.WorkerMiddleware    = (*middleware)(nil)
)

// InsertMany shows Enqueue that the middleware is installed. It inserts jobs that are due soon as available with a
// future time, as River does with jobs that are retried soon.
func (m *middleware) InsertMany(ctx context.Context, jobs []*rivertype.JobInsertParams,
	insert func(context.Context) ([]*rivertype.JobInsertResult, error),
) ([]*rivertype.JobInsertResult, error) {
	p, ok := ctx.Value(passageKey{}).(*passage)
	if !ok || p.key != m.scheduler.key {
		return insert(ctx)
	}
	p.taken = true
	for _, job := range jobs {
		if p.soon && job.State == rivertype.JobStateScheduled {
			job.State = rivertype.JobStateAvailable
		}
	}
	return insert(ctx)
}

// Work runs a job when its turn has come, and ends its reservation when it will not run again.
func (m *middleware) Work(ctx context.Context, job *rivertype.JobRow, work func(context.Context) error) error {
	s := m.scheduler
	id := s.reservationOf(job)
	if id == "" {
		var err error
		if id, err = s.reserve(ctx, job); err != nil {
			return err
		}
		if id == "" {
			return work(ctx)
		}
	}
	turn, err := s.await(ctx, job, id)
	switch {
	case err != nil:
		return fmt.Errorf("scheduler: start: %w", err)
	case turn.Wait > 0:
		_ = river.MetadataSet(ctx, s.readyKey(), turn.ReadyAt.UTC()) // only for people
		return river.JobSnooze(s.snooze(turn))
	}
	if s.config.RetriesPay {
		if err := river.MetadataSet(ctx, s.attemptKey(), job.Attempt); err != nil {
			return fmt.Errorf("scheduler: record the attempt: %w", err)
		}
	}
	err = work(context.WithValue(ctx, turnKey{}, &Turn{Turn: turn, limiter: s.limiter}))
	s.finish(ctx, job, id, err)
	return err
}

// snooze returns how long a job sleeps that must wait for its turn. A wait beyond the turn, as for the end of a pause,
// may become shorter.
func (s *Scheduler) snooze(turn ratelimit.Turn) time.Duration {
	wait := min(turn.Wait, max(longestSnooze, time.Until(turn.ReadyAt)))
	return max(wait-s.config.TakeUpEarly, 0) + time.Millisecond // River's clock and its rounding are not the database's
}

// await waits for the turn and returns it. It returns a turn that is further away than TakeUpEarly at once.
func (s *Scheduler) await(ctx context.Context, job *rivertype.JobRow, id string) (ratelimit.Turn, error) {
	const mostRounds = 3 // the second finds the time to have come, unless the turn has moved
	for round := 1; ; round++ {
		turn, err := s.start(ctx, job, id)
		if err != nil || turn.Wait == 0 || turn.Wait > s.config.TakeUpEarly || round == mostRounds {
			return turn, err
		}
		if err := pause(ctx, turn.Wait); err != nil {
			return turn, err
		}
	}
}

// start starts the job's turn. It takes a new turn if the job must pay again: if retries pay and this is one, if the
// reservation was returned, because then a user has retried the job by hand since, or if the reservation is gone.
func (s *Scheduler) start(ctx context.Context, job *rivertype.JobRow, id string) (ratelimit.Turn, error) {
	turn, err := s.limiter.Start(ctx, id)
	if errors.Is(err, ratelimit.ErrNotReserved) {
		return s.startLost(ctx, job, id, err)
	}
	again := err == nil && turn.Restarted && s.config.RetriesPay && !s.sameAttempt(job)
	if !again && !errors.Is(err, ratelimit.ErrReservationEnded) {
		return turn, err
	}
	turn, err = s.limiter.Renew(ctx, id)
	if err != nil || turn.Wait > 0 {
		return turn, err
	}
	return s.limiter.Start(ctx, id)
}

// startLost starts the turn of a job whose reservation is gone: it takes a new turn under the same ID. An error fails
// the attempt, and River keeps the job.
func (s *Scheduler) startLost(ctx context.Context, job *rivertype.JobRow, id string,
	gone error,
) (ratelimit.Turn, error) {
	requests, err := s.requestsOf(job)
	switch {
	case err != nil:
		return ratelimit.Turn{}, fmt.Errorf("reserve again: %w", err)
	case len(requests) == 0:
		return ratelimit.Turn{}, fmt.Errorf("%w, and the metadata of the job have no %q to reserve it again: "+
			"let Config.Requests return its cost, or cancel the job", gone, s.requestsKey())
	}
	turn, err := s.limiter.Start(ctx, id, requests...)
	if err == nil {
		s.config.Logger.InfoContext(ctx, "scheduler: the reservation of a job was gone, and is made again",
			slog.Int64("job_id", job.ID), slog.String("reservation", id))
	}
	return turn, err
}

// finish ends the reservation of a job that has returned err, unless River will run it again. Maintain ends the
// reservations that finish misses or fails to end.
func (s *Scheduler) finish(ctx context.Context, job *rivertype.JobRow, id string, err error) {
	var snoozed *rivertype.JobSnoozeError
	var cancelled *rivertype.JobCancelError
	unused := KeepEstimate
	switch {
	case err == nil:
	case errors.As(err, &snoozed):
		return
	case errors.As(err, &cancelled), errors.Is(context.Cause(ctx), rivertype.ErrJobCancelledRemotely):
		unused = s.config.Cancelled
	case ctx.Err() != nil: // the client is being stopped
		return
	case job.Attempt >= job.MaxAttempts:
		unused = s.config.Discarded
	default:
		return
	}
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	if err := s.end(end, s.limiter, id, unused); err != nil {
		s.failures.Failed(ctx, s.config.Logger, slog.LevelWarn, "scheduler: a reservation stays open until Maintain finds it",
			err,
			slog.Int64("job_id", job.ID), slog.String("reservation", id))
		return
	}
	s.failures.Worked(ctx, s.config.Logger, "scheduler: reservations of jobs end again")
}
