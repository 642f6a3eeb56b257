package scheduler

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
)

// Cancel cancels a job and its reservation in tx. It replaces client.JobCancelTx(ctx, tx, jobID), and returns its
// result: the job, or river.ErrNotFound.
//
// A job that was never started returns its tokens. For a job that waits for another attempt, Config.Cancelled decides.
// A running job is only asked to stop, as by River; its reservation ends with it. To cancel again, or to cancel a job
// that has ended, changes nothing.
func (s *Scheduler) Cancel(ctx context.Context, client *river.Client[pgx.Tx], tx pgx.Tx,
	jobID int64,
) (*rivertype.JobRow, error) {
	if err := checkCall(ctx, "cancel", client); err != nil {
		return nil, err
	}
	job, err := client.JobCancelTx(ctx, tx, jobID)
	if err != nil {
		return nil, fmt.Errorf("scheduler: cancel job %d: %w", jobID, err)
	}
	id := s.reservationOf(job)
	if id == "" || job.State != rivertype.JobStateCancelled {
		return job, nil
	}
	if err := s.endFailed(ctx, s.limiter.WithTx(tx), id, s.config.Cancelled); err != nil {
		return nil, fmt.Errorf("scheduler: cancel job %d: %w", jobID, err)
	}
	return job, nil
}
