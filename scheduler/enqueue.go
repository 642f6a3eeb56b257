package scheduler

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// EnqueueOpts are River's options for the job, and the options of Enqueue. A nil *EnqueueOpts means the defaults.
type EnqueueOpts struct {
	// InsertOpts go to River as they are. Do not set ScheduledAt: the reservation decides when the job runs.
	river.InsertOpts
	// Jitter delays the job by a random part of this span beyond ReadyAt, so that jobs that become ready together do
	// not start together. The delay is at most half of the time until the turn becomes stale.
	Jitter time.Duration
}

// Enqueued is the result of Enqueue and TryEnqueue. If the reservation was refused, Allowed is false, RetryAfter is the
// wait, and there is no Job.
type Enqueued struct {
	ratelimit.Reservation
	// JobInsertResult is River's. If UniqueSkippedAsDuplicate is set, Job is the existing job, and nothing was taken for
	// this one.
	rivertype.JobInsertResult
	// RunAt is the start time of the job: ReadyAt plus the jitter. It is the zero time without a new job.
	RunAt time.Time
}

// Enqueue reserves the cost of the requests and inserts the job to run at ReadyAt, both in tx: if tx commits, both
// exist, otherwise neither. It replaces client.InsertTx(ctx, tx, args, opts).
//
// If the tokens are available now, the job is available at once. If a limit with a MaxReserved refuses the reservation,
// Enqueue inserts nothing and returns a *[ratelimit.LimitedError]; the transaction stays usable. After an error neither
// a job nor a turn exists, even if the transaction is then committed.
//
// Other errors come from [ratelimit.Limiter.Reserve] and from River's InsertTx, or are ErrInvalidJob and
// ErrNotInstalled. Enqueue never retries: the owner of tx runs it again, as [ratelimit.Limiter.InTx] does.
func (s *Scheduler) Enqueue(ctx context.Context, client *river.Client[pgx.Tx], tx pgx.Tx, args river.JobArgs,
	opts *EnqueueOpts, requests ...ratelimit.Request,
) (Enqueued, error) {
	e, err := s.TryEnqueue(ctx, client, tx, args, opts, requests...)
	if err == nil {
		err = e.Err()
	}
	return e, err
}

// TryEnqueue is Enqueue for a caller that continues after a refusal: it returns no error for a refusal, and the caller
// must check Allowed.
func (s *Scheduler) TryEnqueue(ctx context.Context, client *river.Client[pgx.Tx], tx pgx.Tx, args river.JobArgs,
	opts *EnqueueOpts, requests ...ratelimit.Request,
) (Enqueued, error) {
	if opts == nil {
		opts = &EnqueueOpts{}
	}
	metadata, err := s.check(ctx, client, args, opts)
	if err != nil {
		return Enqueued{}, err
	}
	limiter := s.limiter.WithTx(tx)
	reservation, err := limiter.Reserve(ctx, requests...)
	if err != nil {
		return Enqueued{}, fmt.Errorf("scheduler: enqueue: %w", err)
	}
	if !reservation.Allowed {
		return Enqueued{Reservation: reservation}, nil
	}
	e := Enqueued{Reservation: reservation, RunAt: runAt(reservation, opts.Jitter)}
	inserted, err := s.insert(ctx, client, tx, args, opts.InsertOpts, metadata, e, requests)
	if err != nil {
		return Enqueued{}, s.takeBack(ctx, limiter, reservation.ID, fmt.Errorf("scheduler: enqueue %q: %w", args.Kind(), err))
	}
	e.JobInsertResult = *inserted
	if inserted.UniqueSkippedAsDuplicate {
		if err := limiter.Cancel(ctx, reservation.ID); err != nil {
			return Enqueued{}, fmt.Errorf("scheduler: enqueue %q: take back the turn of a duplicate: %w", args.Kind(), err)
		}
		e.ID, e.ReadyAt, e.StaleAt, e.RunAt = "", time.Time{}, time.Time{}, time.Time{}
	}
	return e, nil
}

func checkCall(ctx context.Context, call string, client *river.Client[pgx.Tx]) error {
	if err := arg.CheckContext(ctx, call); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalidJob, err)
	}
	if client == nil {
		return fmt.Errorf("%w: the client is nil; pass what river.NewClient returned", ErrInvalidJob)
	}
	return nil
}

// check does what can be done before any SQL, and returns the caller's metadata.
func (s *Scheduler) check(ctx context.Context, client *river.Client[pgx.Tx], args river.JobArgs,
	opts *EnqueueOpts,
) (map[string]json.RawMessage, error) {
	if err := checkCall(ctx, "enqueue", client); err != nil {
		return nil, err
	}
	v := reflect.ValueOf(args)
	switch {
	case !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil():
		return nil, fmt.Errorf("%w: the args are nil", ErrInvalidJob)
	case !opts.ScheduledAt.IsZero():
		return nil, fmt.Errorf("%w: InsertOpts.ScheduledAt is set, but the reservation decides when the job runs; leave it "+
			"out", ErrInvalidJob)
	case opts.Jitter < 0:
		return nil, fmt.Errorf("%w: Jitter is %v; use a duration from 0 up", ErrInvalidJob, opts.Jitter)
	}
	return parseMetadata(opts.Metadata, s.key)
}

// runAt returns when the job of a reservation is to start.
func runAt(r ratelimit.Reservation, jitter time.Duration) time.Time {
	if !r.StaleAt.IsZero() {
		jitter = min(jitter, r.StaleAt.Sub(r.ReadyAt)/2)
	}
	return r.ReadyAt.Add(ratelimit.Jitter(jitter).Truncate(time.Microsecond))
}

// passage holds the data that Enqueue and the middleware exchange through the context of an insertion.
type passage struct {
	key   string // of the Scheduler
	soon  bool   // the job is due before River's next look at scheduled jobs
	taken bool   // the middleware is there
}

type passageKey struct{}

// insert inserts the job of e and checks that the middleware saw it.
func (s *Scheduler) insert(ctx context.Context, client *river.Client[pgx.Tx], tx pgx.Tx, args river.JobArgs,
	opts river.InsertOpts, metadata map[string]json.RawMessage, e Enqueued,
	requests []ratelimit.Request,
) (*rivertype.JobInsertResult, error) {
	described, err := s.describe(e.Reservation, requests)
	if err != nil {
		return nil, err
	}
	for key, value := range described {
		if metadata[key], err = json.Marshal(value); err != nil {
			return nil, err
		}
	}
	if opts.Metadata, err = json.Marshal(metadata); err != nil {
		return nil, err
	}
	// The earlier moment is when a worker may take up the job.
	due := e.RunAt.Add(-s.config.TakeUpEarly)
	if !due.After(e.At) {
		due = e.At
	}
	opts.ScheduledAt = due
	p := &passage{key: s.key, soon: due.Sub(e.At) < 2*riverInterval}
	inserted, err := client.InsertTx(context.WithValue(ctx, passageKey{}, p), tx, args, &opts)
	var pgErr *pgconn.PgError
	switch {
	case errors.As(err, &pgErr) && pgErr.Code == "42P01": // undefined_table
		return nil, fmt.Errorf("%w: %w", ErrNotMigrated, err)
	case err != nil:
		return nil, err
	}
	if p.taken {
		return inserted, nil
	}
	if !inserted.UniqueSkippedAsDuplicate {
		if _, err := client.JobDeleteTx(ctx, tx, inserted.Job.ID); err != nil {
			return nil, errors.Join(ErrNotInstalled, err)
		}
	}
	return nil, ErrNotInstalled
}

// takeBack gives back the turn of a job that could not be inserted, and returns why. In a transaction that
// the failure ended there is nothing to give back, and the attempt does no harm.
func (s *Scheduler) takeBack(ctx context.Context, limiter *ratelimit.Limiter, id string, why error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	_ = limiter.Cancel(ctx, id)
	return why
}
