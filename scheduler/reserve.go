package scheduler

import (
	"context"
	"fmt"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/pgratelimit/internal/guard"
)

// reserve reserves the cost of a job that was inserted without Enqueue, when a worker first takes it up. It returns the
// ID of the reservation, which the job's metadata get when the attempt ends; "" for a job that costs nothing.
func (s *Scheduler) reserve(ctx context.Context, job *rivertype.JobRow) (id string, err error) {
	requests, err := requestsFor(job, s.config.Requests)
	if err != nil {
		return "", fmt.Errorf("scheduler: requests: %w", err)
	}
	if len(requests) == 0 {
		return "", nil
	}
	deciding, cancel := guard.Deciding(ctx, decideTimeout) // or a client that stops could lose it, and the job pay twice
	defer cancel()
	r, err := s.limiter.Reserve(deciding, requests...)
	switch {
	case err != nil:
		return "", fmt.Errorf("scheduler: reserve: %w", err)
	case !r.Allowed: // by a MaxReserved, or a pause
		return "", river.JobSnooze(min(max(r.RetryAfter, time.Millisecond), longestSnooze))
	}
	described, err := s.describe(r, requests)
	for key, value := range described {
		if err == nil {
			err = river.MetadataSet(ctx, key, value)
		}
	}
	if err != nil {
		return "", s.takeBack(ctx, s.limiter, r.ID, fmt.Errorf("scheduler: record the reservation: %w", err))
	}
	return r.ID, nil
}
