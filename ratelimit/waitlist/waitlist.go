// Package waitlist lets callers wait for a limit. The callers of a process get slots or tokens in the order in which
// they came, and processes take turns.
//
//	var Exports = ratelimit.Define("exports", ratelimit.Concurrency{Slots: 3, Lease: 30 * time.Second})
//
//	exports, err := waitlist.New(limiter, Exports, waitlist.Config{Pool: pool})
//	go exports.Run(ctx) // listens for slots that other processes release
//
//	err = exports.Hold(ctx, func(ctx context.Context, lease ratelimit.Lease) error {
//		return export(ctx, tenant, lease.Fence)
//	}, Exports.For(tenant))
//
// The callers of a process stand in a queue for each key. Processes whose callers wait for the same key take turns:
// each process has a place in a line, asks for its first caller when it is the first of the line, and then goes to the
// end of the line. The line is a limit of its own, called name.line, in which a place is a lease. So it needs no table,
// and the place of a process that dies is free after 1.5 seconds at the latest. The slots that it held are free when
// their leases end.
//
// Only the first caller of the first process asks for a slot: after a notification of a release, when the next lease
// ends, and otherwise each Config.Poll. So a thousand waiting callers cost the database as much as one.
//
// For tokens of a limit that takes reservations, Wait of package take is better: it needs no line, because a caller
// reserves its tokens at once. A sliding window takes no reservations.
package waitlist

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

var (
	// ErrInvalidConfig is returned by New and Run if an argument or a field of Config cannot be used.
	ErrInvalidConfig = errors.New("waitlist: invalid configuration")
	// ErrTooManyWaiting is returned by Acquire, Take and Hold if Config.MaxWaiting callers of this process, or 1000
	// processes, wait for the key.
	ErrTooManyWaiting = errors.New("waitlist: too many callers wait")
)

// Config holds the settings of a List. The zero Config is ready for use.
type Config struct {
	// Pool has Release tell the other processes of each slot, and is where Run listens. It must lead to the server itself
	// or to a pooler in session mode. Defaults to nil: the others find a free slot by Poll.
	Pool *pgxpool.Pool
	// Poll is how often the first in line asks for a slot, from a millisecond on. It limits how late a caller gets a slot
	// that was released by Limiter.Release or by a process without Pool. For tokens, which come at a known time, it
	// doesn't poll. Defaults to 100ms.
	Poll time.Duration
	// MaxWaiting is how many callers of this process may wait for a key. Defaults to 10,000.
	MaxWaiting int
}

const (
	maxPlaces = 1000 // processes in a line
	// longestPlace is how long the place of a dead process is kept: for so long nobody gets a slot if it was the first of
	// the line. A place is renewed three times as often, which costs less than the looks at the line. A process that
	// stalls for longer goes to the end of the line.
	longestPlace = 1500 * time.Millisecond
)

// List has the callers of this process that wait for a limit. It is safe for concurrent use.
type List struct {
	config  Config
	limiter *ratelimit.Limiter
	limit   ratelimit.Limit
	line    ratelimit.Limit // its slots are the places of processes

	mu     sync.Mutex
	queues map[string]*queue
}

// New returns a List for a limit. Errors wrap ErrInvalidConfig and say what to change.
func New(limiter *ratelimit.Limiter, limit ratelimit.Limit, config Config) (*List, error) {
	config.Poll = cmp.Or(config.Poll, 100*time.Millisecond)
	config.MaxWaiting = cmp.Or(config.MaxWaiting, 10_000)
	if err := guard.CheckLimiter(limiter); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidConfig, err)
	}
	switch {
	case limit.Name() == "":
		return nil, fmt.Errorf("%w: the limit is the zero Limit; pass one of ratelimit.Define or NewLimit", ErrInvalidConfig)
	case config.Poll < time.Millisecond:
		return nil, fmt.Errorf("%w: field Poll is %v; use a millisecond or more", ErrInvalidConfig, config.Poll)
	case config.MaxWaiting < 1:
		return nil, fmt.Errorf("%w: field MaxWaiting is %d; use 1 or more", ErrInvalidConfig, config.MaxWaiting)
	}
	place := longestPlace
	if policy, holds := limit.Policy().(ratelimit.Concurrency); holds && policy.Lease > 0 {
		place = min(place, policy.Lease)
	}
	line, err := ratelimit.NewLimit(limit.Name()+".line", ratelimit.Concurrency{Slots: maxPlaces, Lease: place})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidConfig, err)
	}
	return &List{config: config, limiter: limiter, limit: limit, line: line, queues: make(map[string]*queue)}, nil
}

// Limits returns the limits of the List, for Limiter.Prune and Limiter.Maintain.
func (s *List) Limits() []ratelimit.Limit { return []ratelimit.Limit{s.limit, s.line} }

// Acquire waits for a slot of the first request's bucket, and acquires the slots and tokens of all requests, as
// [ratelimit.Limiter.Acquire] does. The first request is for the limit of the List. It waits until ctx ends, and then
// returns the error and the cause of ctx. But if it's acquiring a free slot just then, it waits for the answer, and may
// return a lease. It never returns a refusal: it waits for the other requests, too, and the
// callers behind it wait as long. It asks by Limiter.Check, so that a caller that waits is not counted as refused. It
// returns ErrTooManyWaiting, ratelimit.ErrInvalidRequest for another first request or more than 63, and the other
// errors of Limiter.Acquire, at once.
//
// Release the slot with Release. Callers of Limiter.Acquire do not stand in line, and can overtake callers that wait
// here.
func (s *List) Acquire(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Lease, error) {
	acquire := func() (ratelimit.Lease, error) { // to its end, or the slot could stay held until the lease ends
		return s.limiter.Acquire(context.WithoutCancel(ctx), requests...)
	}
	return s.wait(&waiter{ctx: ctx, requests: requests, slots: true, acquire: acquire})
}

// Take waits for the tokens of the first request, and takes the tokens of all requests, as [ratelimit.Limiter.Take]
// does. It waits as Acquire does. Tokens that come earlier than was known, by a Credit, a Reset or a changed rule, are
// not noticed before.
func (s *List) Take(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Decision, error) {
	take := func() (ratelimit.Lease, error) {
		d, err := s.limiter.Take(ctx, requests...)
		return ratelimit.Lease{Decision: d}, err
	}
	lease, err := s.wait(&waiter{ctx: ctx, requests: requests, acquire: take})
	return lease.Decision, err
}

// keyOf returns the stored key of the first request.
func (s *List) keyOf(ctx context.Context, requests []ratelimit.Request) (string, error) {
	if err := arg.CheckContext(ctx, "a call for "+s.limit.Name()); err != nil {
		return "", fmt.Errorf("waitlist: %w: %w", ratelimit.ErrInvalidRequest, err)
	}
	if len(requests) == 0 || requests[0].Limit().Name() != s.limit.Name() {
		return "", fmt.Errorf("%w: the first request to wait for must be for the limit of the waitlist, %q",
			ratelimit.ErrInvalidRequest, s.limit.Name())
	}
	return s.limiter.StoredKey(requests[0])
}

// wait returns the answer to a caller: at once if nobody waits for its key, and else when it is its turn.
func (s *List) wait(w *waiter) (_ ratelimit.Lease, err error) {
	if w.key, err = s.keyOf(w.ctx, w.requests); err != nil {
		return ratelimit.Lease{}, err
	}
	if !s.waits(w.key) {
		emptyLine := s.line.ForStoredKey(w.key).Cost(maxPlaces)
		if lease, err := s.ask(w, emptyLine); err != nil || lease.Allowed {
			return lease, err
		}
	}
	w.done = make(chan answer, 1)
	if err := s.join(w); err != nil {
		return ratelimit.Lease{}, err
	}
	var a answer
	select {
	case a = <-w.done:
	case <-w.ctx.Done():
		if a.err = w.ctx.Err(); !s.leave(w) {
			a = <-w.done // it was asked for this moment
		}
	}
	if a.err != nil && w.ctx.Err() != nil {
		a.err = fmt.Errorf("waitlist: wait for %q: %w", s.limit.Name(), errors.Join(w.ctx.Err(), context.Cause(w.ctx)))
	}
	return a.lease, a.err
}

// Release returns the slots of a lease, and wakes the callers that wait for the bucket of the request with which it was
// acquired. It returns the errors of [ratelimit.Limiter.Release], and ratelimit.ErrInvalidRequest as Acquire does.
func (s *List) Release(ctx context.Context, lease ratelimit.Lease, request ratelimit.Request) error {
	key, err := s.keyOf(ctx, []ratelimit.Request{request})
	if err != nil {
		return err
	}
	err = s.limiter.Release(ctx, lease.ID)
	s.released(ctx, key)
	return err
}

// Hold acquires slots, calls fn, and releases the slots when fn has returned or panicked. It renews the lease
// meanwhile: the context of fn ends if the lease is lost, as in [ratelimit.Limiter.Hold].
func (s *List) Hold(ctx context.Context, fn func(ctx context.Context, lease ratelimit.Lease) error,
	requests ...ratelimit.Request,
) error {
	key, err := s.keyOf(ctx, requests)
	if err != nil {
		return err
	}
	lease, err := s.Acquire(ctx, requests...)
	if err != nil {
		return err
	}
	held, release := s.limiter.KeepAlive(ctx, lease)
	defer s.released(context.WithoutCancel(ctx), key)
	defer release()
	err = fn(held, lease)
	release()
	if lost := context.Cause(held); errors.Is(lost, ratelimit.ErrLeaseLost) && !errors.Is(err, ratelimit.ErrLeaseLost) {
		return errors.Join(fmt.Errorf("waitlist: hold: %w", lost), err)
	}
	return err
}
