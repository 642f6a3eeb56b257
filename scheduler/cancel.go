package scheduler

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
)

// Cancel cancels a job and its reservation, as parts of tx. It takes the place of client.JobCancelTx(ctx, tx,
// jobID), and returns what that returns: the job, or river.ErrNotFound.
//
// The tokens of a job that was never started go back, those of one that waits for another attempt follow
// Config.Cancelled. A job that is running is only asked to stop, as River does; its reservation is ended with
// it. Cancelling again, or cancelling a job that has ended, changes nothing.
func (s *Scheduler) Cancel(ctx context.Context, client *river.Client[pgx.Tx], tx pgx.Tx, jobID int64) (*rivertype.JobRow, error) {
	if client == nil {
		return nil, fmt.Errorf("%w: the client is nil; pass what river.NewClient returned", ErrInvalidJob)
	}
	job, err := client.JobCancelTx(ctx, tx, jobID)
	if err != nil {
		return nil, fmt.Errorf("scheduler: cancel job %d: %w", jobID, err)
	}
	id, ok := s.reservationOf(job)
	if !ok || job.State != rivertype.JobStateCancelled {
		return job, nil
	}
	if err := s.endFailed(ctx, s.limiter.WithTx(tx), id, s.config.Cancelled); err != nil {
		return nil, fmt.Errorf("scheduler: cancel job %d: %w", jobID, err)
	}
	return job, nil
}
