package ratelimit

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/slots"
	"github.com/pgratelimit/pgratelimit/internal/words"
)

// Concurrency lets at most so many hold a slot at the same time. Slots are had with [Limiter.Acquire], which takes a lease
// on them, and given back with [Limiter.Release]. A holder that dies has its slots until the lease ends, and then others
// get them. Tokens, in what a call is told, are free slots; there are fewer than none while more are held than Most has
// become.
//
// Most holders need [Limiter.Hold], which renews and releases for them.
//
// A holder that works on after its lease has ended does so beside others: see [Lease] for what it has to do.
//
// Check tells whether Acquire would be allowed, Value how many slots are free, and Reset frees all: their holders are told
// ErrLeaseLost. Take, Reserve, Credit and Charge have no lease to give, and return ErrInvalidRequest.
//
// A change of the policy leaves the leases that are held as they are. Where another kind of policy takes the place of
// this one, or this of another, no slot is held at first; and while programs that define a limit as either run at once, slots
// may seem free that are held, and tokens be there again that were taken: give the limit another name then.
//
// Leases end by the database's clock. When that steps back, they are held for longer by as much; when it jumps ahead,
// they end early, and what they have given is held for no longer than a lease after it was put right.
type Concurrency struct {
	// Most is how many slots there are: from 1 to 1000.
	Most int
	// Lease is how long a slot is held without RenewLease: whole microseconds, from a millisecond to a day. Defaults to a minute.
	Lease time.Duration
}

// maxSlots bounds what the row of one bucket holds.
const maxSlots = slots.MaxSlots

// String returns the policy in words, as in "5 at a time, leases of 1m".
func (p Concurrency) String() string {
	return fmt.Sprintf("%d at a time, leases of %s", p.Most, words.Span(p.lease()))
}

// lease returns the length of a lease.
func (p Concurrency) lease() time.Duration {
	if p.Lease == 0 {
		return time.Minute
	}
	return p.Lease
}

func (p Concurrency) compile() (bucket.Terms, error) {
	lease := p.lease()
	switch {
	case p.Most < 1 || p.Most > maxSlots:
		return bucket.Terms{}, fmt.Errorf("its Most is %d; it must be from 1 to %d slots", p.Most, maxSlots)
	case lease < time.Millisecond || lease > Day || lease%time.Microsecond != 0:
		return bucket.Terms{}, fmt.Errorf("its Lease is %v; it must be whole microseconds, from 1ms to 24h (write 30*time.Second, not 30)", p.Lease)
	}
	return bucket.Terms{
		Capacity: float64(p.Most), Rate: float64(p.Most), Step: 1, Steps: float64(lease.Microseconds()), Phase: bucket.MinInstant, Shards: 1,
		Kind: bucket.Concurrent{Lease: lease.Microseconds()},
	}, nil
}

// holds reports whether slots of the limit are held, and no tokens are taken.
func (l Limit) holds() bool {
	t := l.terms()
	return bucket.Holds(&t)
}

// verbAcquire is the verb of Acquire.
const verbAcquire = "acquire"

// errHolds says what a verb does not do that is called on a limit on concurrency.
var errHolds = errors.New("call Acquire, which takes a lease on slots, and Release")

// checkVerb returns an error when a verb means nothing for the limit, or does not with that cost.
func checkVerb(limit Limit, verb string, cost float64) error {
	if !limit.holds() {
		return nil
	}
	switch verb {
	case verbAcquire, verbCheck:
		if cost == 0 && verb == verbAcquire {
			return fmt.Errorf("%w: 0 of %q; ask for one slot or more", ErrInvalidCost, limit.Name())
		}
		return checkSlots(limit, cost)
	case "value", "reset":
		return nil
	}
	return fmt.Errorf("%w: %s of %q, which is %v: %w", ErrInvalidRequest, verb, limit.Name(), limit.Policy(), errHolds)
}

// checkSlots returns an error when the limit is one on concurrency and cost is not a whole number of slots.
func checkSlots(limit Limit, cost float64) error {
	if limit.holds() && cost != math.Trunc(cost) {
		return fmt.Errorf("%w: %v of %q; slots are whole: ask for one or more of them", ErrInvalidCost, cost, limit.Name())
	}
	return nil
}
