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

// Enqueued is the result of Enqueue and TryEnqueue. If the reservation was refused, Allowed is false, RetryAfter is the
// wait, and there is no Job.
type Enqueued struct {
	ratelimit.Reservation
	// JobInsertResult is River's. If UniqueSkippedAsDuplicate is set, Job is the existing job, and nothing was taken for
	// this one.
	rivertype.JobInsertResult
}

// Enqueue reserves the cost of the requests and inserts the job to run at ReadyAt, both in tx: if tx commits, both
// exist, otherwise neither. It replaces client.InsertTx(ctx, tx, args, opts), but opts has no ScheduledAt.
//
// If the tokens are available now, the job is available at once. If a limit with a MaxReserved refuses the reservation,
// Enqueue inserts nothing and returns a *[ratelimit.LimitedError]; the transaction stays usable. After an error neither
// a job nor a turn exists, even if the transaction is then committed.
//
// Other errors come from [ratelimit.Limiter.Reserve] and from River's InsertTx, or are ErrInvalidJob and
// ErrNotInstalled. Enqueue never retries: the owner of tx runs it again, as [ratelimit.Limiter.InTx] does.
func (s *Scheduler) Enqueue(ctx context.Context, client *river.Client[pgx.Tx], tx pgx.Tx, args river.JobArgs,
	opts *river.InsertOpts, requests ...ratelimit.Request,
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
	opts *river.InsertOpts, requests ...ratelimit.Request,
) (Enqueued, error) {
	if opts == nil {
		opts = &river.InsertOpts{}
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
	inserted, err := s.insert(ctx, client, tx, args, *opts, metadata, reservation, requests)
	if err != nil {
		return Enqueued{}, s.takeBack(ctx, limiter, reservation.ID, fmt.Errorf("scheduler: enqueue %q: %w", args.Kind(), err))
	}
	e := Enqueued{Reservation: reservation, JobInsertResult: *inserted}
	if inserted.UniqueSkippedAsDuplicate {
		if err := limiter.Cancel(ctx, reservation.ID); err != nil {
			return Enqueued{}, fmt.Errorf("scheduler: enqueue %q: take back the turn of a duplicate: %w", args.Kind(), err)
		}
		e.ID, e.ReadyAt, e.StaleAt = "", time.Time{}, time.Time{}
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
	opts *river.InsertOpts,
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
	}
	return parseMetadata(opts.Metadata, s.key)
}

// passage holds the data that Enqueue and the middleware exchange through the context of an insertion.
type passage struct {
	key   string // of the Scheduler
	soon  bool   // the job is due before River's next look at scheduled jobs
	taken bool   // the middleware is there
}

type passageKey struct{}

// insert inserts the job of a reservation and checks that the middleware saw it.
func (s *Scheduler) insert(ctx context.Context, client *river.Client[pgx.Tx], tx pgx.Tx, args river.JobArgs,
	opts river.InsertOpts, metadata map[string]json.RawMessage, r ratelimit.Reservation,
	requests []ratelimit.Request,
) (*rivertype.JobInsertResult, error) {
	described, err := s.describe(r, requests)
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
	due := r.ReadyAt.Add(-s.config.TakeUpEarly)
	if !due.After(r.At) {
		due = r.At
	}
	opts.ScheduledAt = due
	p := &passage{key: s.key, soon: due.Sub(r.At) < 2*riverInterval}
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
