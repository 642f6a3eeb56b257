package ratelimit

import (
	"fmt"
	"math"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/slots"
	"github.com/pgratelimit/pgratelimit/internal/words"
)

// Concurrency limits how many slots are held at the same time. [Limiter.Acquire] takes a lease on slots, and
// [Limiter.Release] returns them. If a holder dies, its slots are free when the lease ends. [Limiter.Hold] renews and
// releases for you.
//
// A holder that works on after its lease has ended does so beside other holders. See [Lease] for how to prevent that.
// In answers, tokens are free slots. They are negative while more slots are held than Slots, after Slots was lowered.
//
// Check reports whether Acquire would be allowed. Value returns the number of free slots. Reset frees all slots; their
// holders get ErrLeaseLost. Take, Reserve, Credit and Charge return ErrInvalidRequest, because they give no lease.
//
// If you change Slots or Lease, held leases stay as they are. If you change the kind of a limit to or from Concurrency,
// no slot is held at first. While some programs define a limit as Concurrency and others as another kind, held slots
// can seem free, and taken tokens can be available again. So give the limit another name instead.
//
// Leases end by the database's clock. If it steps back, they end later by as much. If it jumps ahead, they end early.
// Once it is right again, a lease that it gave while ahead ends within the length of a lease.
type Concurrency struct {
	// Slots is the number of slots: from 1 to 1000.
	Slots int
	// Lease is the time for which a slot is held without RenewLease: whole microseconds, from 1ms to 24h. Defaults to a
	// minute.
	Lease time.Duration
}

// maxSlots is the maximum number of slots, because a refusal reads the leases on them.
const maxSlots = slots.MaxSlots

// String returns the policy as text, such as "5 at a time, leases of 1m".
func (p Concurrency) String() string {
	return fmt.Sprintf("%d at a time, leases of %s", p.Slots, words.Span(p.lease()))
}

// lease returns the length of a lease, or its default.
func (p Concurrency) lease() time.Duration {
	if p.Lease == 0 {
		return time.Minute
	}
	return p.Lease
}

func (p Concurrency) compile() (bucket.Terms, error) {
	lease := p.lease()
	switch {
	case p.Slots < 1 || p.Slots > maxSlots:
		return bucket.Terms{}, fmt.Errorf("its Slots is %d; it must be from 1 to %d slots", p.Slots, maxSlots)
	case lease < time.Millisecond || lease > Day || lease%time.Microsecond != 0:
		return bucket.Terms{}, fmt.Errorf("its Lease is %v; it must be whole microseconds, from 1ms to 24h (write "+
			"30*time.Second, not 30)", p.Lease)
	}
	return bucket.Terms{
		Capacity: float64(p.Slots), Rate: float64(p.Slots), Step: 1, Steps: float64(lease.Microseconds()),
		Phase: bucket.MinInstant,
		Kind:  bucket.Concurrent{Lease: lease.Microseconds()},
	}, nil
}

// holds reports whether the limit gives slots in place of tokens.
func (l Limit) holds() bool {
	t := l.terms()
	return bucket.Holds(&t)
}

const verbAcquire = "acquire"

// checkVerb returns an error if the limit does not support the verb, or not with this cost.
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
	return fmt.Errorf("%w: %s of %q, which is %v: call Acquire, which takes a lease on slots, and Release",
		ErrInvalidRequest, verb, limit.Name(), limit.Policy())
}

// checkSlots returns an error if the limit has a Concurrency policy and cost is not a whole number of slots.
func checkSlots(limit Limit, cost float64) error {
	if limit.holds() && cost != math.Trunc(cost) {
		return fmt.Errorf("%w: %v of %q; slots are whole: ask for one or more of them", ErrInvalidCost, cost, limit.Name())
	}
	return nil
}

// slotsText is a Concurrency as text.
type slotsText struct {
	Kind  Kind `json:"kind"`
	Slots int  `json:"slots"`
	Lease span `json:"lease,omitempty"`
}

func (p Concurrency) text() policyText {
	return &slotsText{KindConcurrency, p.Slots, span(without(p.Lease, time.Minute))}
}

func (t *slotsText) policy() (Policy, error) {
	return Concurrency{Slots: t.Slots, Lease: time.Duration(t.Lease)}, nil
}

func (p Concurrency) scaled(times float64) Policy {
	p.Slots = int(min(max(math.Floor(float64(p.Slots)*times), 1), maxSlots))
	return p
}
