package httplimit

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"

	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// ErrNoLimit is returned by [Admission.Settle] for a limit that the request's middleware does not have.
var ErrNoLimit = errors.New("httplimit: the middleware does not have this limit")

// Admission has the tokens that the limits took from a request in progress. It's safe for concurrent use, and stays
// usable after the handler has returned.
type Admission struct {
	middleware *middleware
	outer      *Admission      // of a middleware around this one; nil when there is none
	lease      ratelimit.Lease // with the decision
	stated     []stated        // what its fields tell of that
	taken      []ratelimit.Request

	mu      sync.Mutex
	charges []*charge
	merged  []stated // by handlers: see Merge
}

// charge is what one limit took.
type charge struct {
	ask     ask
	settled bool
}

// negligible is the share of a capacity below which a difference is a rounding, which the core would not book.
const negligible = 1e-9

type contextKey struct{}

// FromContext returns the Admission of the middleware around a handler, and false if there is no middleware or it
// skipped the request.
func FromContext(ctx context.Context) (*Admission, bool) {
	a, ok := ctx.Value(contextKey{}).(*Admission)
	return a, ok
}

// Decision returns the innermost middleware's decision, or one without States if no limit applied, or if the store
// failed and FailOpen is set.
func (a *Admission) Decision() ratelimit.Decision { return a.lease.Decision }

// State returns the limit's state when the request was decided, by this middleware or one around it, and false if no
// decision was about the limit.
func (a *Admission) State(limit ratelimit.Limit) (ratelimit.State, bool) {
	for ; a != nil; a = a.outer {
		for _, s := range a.lease.States {
			if s.Limit.Name() == limit.Name() {
				return s, true
			}
		}
	}
	return ratelimit.State{}, false
}

// Settle charges the request's actual cost to each of the limits: it returns surplus tokens, or takes the missing ones
// now, below zero if necessary. Each limit is settled once, so another call changes nothing. A limit that took nothing
// stays at nothing, because it didn't apply, the store failed, or it's off, or in shadow mode and had too few tokens.
// Tokens of a window that has ended aren't returned. Differences under a billionth of the capacity are ignored.
//
// Settle continues for up to Config.DecisionTimeout if ctx is cancelled. After an error the difference may be charged
// or not, and another call may charge it twice. It returns ErrNoLimit for a limit that the middleware doesn't have.
func (a *Admission) Settle(ctx context.Context, actual float64, limits ...ratelimit.Limit) error {
	if !(actual >= 0) || math.IsInf(actual, 1) {
		return fmt.Errorf("httplimit: settle: %w: %v; a cost is a number from 0 up", ratelimit.ErrInvalidCost, actual)
	}
	wanted := make(map[string]bool, len(limits))
	for _, limit := range limits {
		if !a.knows(limit.Name()) {
			return fmt.Errorf("httplimit: settle: %w: %q", ErrNoLimit, limit.Name())
		}
		wanted[limit.Name()] = true
	}
	return a.settle(ctx, "settle", actual, func(c *charge) bool { return wanted[c.ask.limit.Name()] })
}

// Credit returns everything that isn't settled yet, for example for a request that was answered from a cache. It's
// Settle with 0 for each limit of this middleware and of those around it.
func (a *Admission) Credit(ctx context.Context) error {
	return a.settle(ctx, "credit", 0, func(*charge) bool { return true })
}

// settle settles the wanted charges at actual, of this middleware and of the middlewares around it.
func (a *Admission) settle(ctx context.Context, verb string, actual float64, wanted func(*charge) bool) error {
	for ; a != nil; a = a.outer {
		charges := a.claim(wanted)
		if err := a.book(ctx, charges, actual); err != nil {
			a.release(charges)
			return fmt.Errorf("httplimit: %s: %w", verb, err)
		}
	}
	return nil
}

// knows reports whether the middleware has the limit, or may have it by Config.Requests.
func (a *Admission) knows(limit string) bool {
	for ; a != nil; a = a.outer {
		if a.middleware.config.Requests != nil {
			return true
		}
		for _, l := range a.middleware.config.Limits {
			if l.Limit.Name() == limit {
				return true
			}
		}
	}
	return false
}

// credits reports whether a limit may give back by the response.
func (a *Admission) credits() bool {
	for _, c := range a.charges {
		if c.ask.spec.Credit != nil {
			return true
		}
	}
	return false
}

// claim marks as settled, and returns, the charges that are not and that wanted is true of.
func (a *Admission) claim(wanted func(*charge) bool) []*charge {
	a.mu.Lock()
	defer a.mu.Unlock()
	var claimed []*charge
	for _, c := range a.charges {
		if !c.settled && wanted(c) {
			c.settled = true
			claimed = append(claimed, c)
		}
	}
	return claimed
}

// release undoes claim, where the charges could not be booked.
func (a *Admission) release(charges []*charge) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range charges {
		c.settled = false
	}
}

// book charges or gives back the difference between the charges and actual.
func (a *Admission) book(ctx context.Context, charges []*charge, actual float64) error {
	m := a.middleware
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), m.config.DecisionTimeout)
	defer cancel()
	var more, less []ratelimit.Request
	for _, c := range charges {
		difference := actual - c.ask.cost
		switch {
		case math.Abs(difference) < max(m.limiter.Resolve(c.ask.request()).Capacity(), 1)*negligible:
		case difference > 0:
			more = append(more, c.ask.request().Cost(difference))
		default:
			less = append(less, c.ask.request().Cost(-difference))
		}
	}
	var failed []error
	if len(more) > 0 {
		failed = append(failed, m.limiter.Charge(ctx, more...))
	}
	if len(less) > 0 {
		failed = append(failed, m.limiter.CreditTaken(ctx, a.lease.At, less...))
	}
	return errors.Join(failed...)
}

// charged returns the charges of asks by the decision. A refusal charges nothing. Limits that are off, slots (which end
// by themselves), and limits in shadow that did not have enough are charged nothing either.
func charged(asks []ask, d ratelimit.Decision) []*charge {
	if !d.Allowed {
		return nil
	}
	charges := make([]*charge, 0, len(asks))
	for i, a := range asks {
		if s := &d.States[i]; s.Allowed && !s.NotAsked && !guard.IsHeld(s.Limit) {
			a.cost = s.Cost
			charges = append(charges, &charge{ask: a})
		}
	}
	return charges
}
