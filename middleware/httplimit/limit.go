package httplimit

import (
	"errors"
	"fmt"
	"math"
	"net/http"
	"regexp"

	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Limit is a limit in front of a handler, with the key and the cost of a request.
type Limit struct {
	// Limit is the limit. Each Limit of a Config needs another one: requests may differ in cost and key. A request
	// holds the slots of a [ratelimit.Concurrency] while its handler runs; its cost is their number.
	Limit ratelimit.Limit
	// Key returns the key of the bucket that pays. An error that wraps ErrNoKey or ErrBadKey is answered 400, and any
	// other 503, even with FailOpen, so that no request shares a bucket by mistake, and none passes without one.
	Key Key
	// Plan returns the caller's plan, which your own code has verified: see [ratelimit.Request.Plan]. ErrNoKey means no
	// plan; other errors are answered as errors of Key. A nil Plan means no plan.
	Plan Key
	// Global makes all requests pay from one bucket, in place of Key.
	Global bool
	// Cost returns the cost of a request. Defaults to FixedCost(1).
	Cost Cost
	// When reports whether the limit applies to a request, for example by the plan of its caller. Defaults to nil, always.
	When func(r *http.Request) bool
	// Credit says by the response's status whether the request gets its tokens back: see [CreditOn5xx] and
	// [CountOnlyFailures]. Slots are always released. A nil Credit means never.
	Credit Credit
	// Unit is the unit of the limit in header fields: lower-case letters, digits and hyphens, as in "tokens" or
	// "content-bytes". Defaults to requests.
	Unit string
}

const maxLimits = 64 // limits in one call of the core

var validUnit = regexp.MustCompile(`^[a-z0-9-]{1,32}$`)

// validate returns an error unless l can ask every request.
func (l *Limit) validate() error {
	switch {
	case l.Limit.Policy() == nil:
		return errors.New("it needs a Limit, made with ratelimit.Define")
	case l.Global == (l.Key != nil):
		return errors.New("it needs a Key that says who pays, or Global for one bucket for everybody, and not both")
	case l.Unit != "" && !validUnit.MatchString(l.Unit):
		return fmt.Errorf("its Unit is %.40q; use up to 32 lower-case letters, digits and hyphens", l.Unit)
	}
	if l.Credit != nil && guard.IsHeld(l.Limit) {
		return errors.New("it has a Credit, and slots go back in any case when the handler has returned; leave Credit out")
	}
	if v, ok := l.Cost.(interface{ validate() error }); ok {
		if err := v.validate(); err != nil {
			return err
		}
	}
	return nil
}

// validateCapacity returns an error if a fixed cost is larger than the capacity of the Limit's definition.
func (l *Limit) validateCapacity() error {
	if l.Limit.Capacity() == 0 {
		return errors.New("its limit has the Capacity None, from which only reservations can take")
	}
	cost := l.Cost
	if cost == nil {
		cost = FixedCost(1)
	}
	if known, ok := cost.(interface{ static() []staticCost }); ok {
		for _, c := range known.static() {
			if err := c.validate(l.Limit); err != nil {
				return err
			}
		}
	}
	return nil
}

// validateLimits checks each of limits, that their names differ, and that their costs fit into them, unless the limiter
// has policies that may have other capacities.
func validateLimits(limits []Limit, hasPolicies bool) error {
	if len(limits) > maxLimits {
		return fmt.Errorf("field Limits has %d; use up to %d", len(limits), maxLimits)
	}
	seen := make(map[string]bool, len(limits))
	for i := range limits {
		name := limits[i].Limit.Name()
		err := limits[i].validate()
		if err == nil && !hasPolicies {
			err = limits[i].validateCapacity()
		}
		if err != nil {
			return fmt.Errorf("field Limits[%d] (%s): %w", i, name, err)
		}
		if seen[name] {
			return fmt.Errorf("field Limits[%d]: an earlier one has the limit %q; define one with a name of its own, "+
				"or let one choose the key or the cost by the request", i, name)
		}
		seen[name] = true
	}
	return nil
}

// ask is the charge of a request for one Limit.
type ask struct {
	spec  *Limit
	limit ratelimit.Limit
	key   string // empty when spec is global
	plan  string // empty when there is none
	cost  float64
	given *ratelimit.Request // from Config.Requests; if nil, the other fields make the request
}

// ask returns what l asks a request for. A fault is the reason why it cannot.
func (l *Limit) ask(request *http.Request) (ask, *fault) {
	a := ask{spec: l, limit: l.Limit, cost: 1}
	var err error
	if l.Key != nil {
		if a.key, err = l.Key.Of(request); err != nil {
			return ask{}, unasked(a, err)
		}
	}
	if l.Plan != nil {
		if a.plan, err = l.Plan.Of(request); err != nil && !errors.Is(err, ErrNoKey) {
			return ask{}, unasked(a, err)
		}
	}
	if l.Cost != nil {
		if a.cost, err = l.Cost.Of(request); err != nil {
			return ask{}, unasked(a, err)
		}
		a.cost = min(a.cost, math.MaxFloat64) // an infinite cost exceeds the capacity; it is not invalid
	}
	return a, nil
}

// unasked returns the fault of a request whose limit, key or cost is an error. a has the parts that are known.
func unasked(a ask, err error) *fault {
	result, ofRequest := requestFault(err)
	if !ofRequest {
		result = guard.FailedClosed
	}
	return &fault{result: result, limit: a.limit, key: a.key, plan: a.plan, err: err}
}

// requestFault returns the result for an error, and whether the request caused it.
func requestFault(err error) (result string, ofRequest bool) {
	if errors.Is(err, ErrNoKey) || errors.Is(err, ErrBadKey) {
		return guard.BadKey, true
	}
	return guard.Fault(err)
}

// request returns the Request for the Limiter.
func (a ask) request() ratelimit.Request {
	if a.given != nil {
		return *a.given
	}
	request := a.limit.Global()
	if !a.spec.Global {
		request = a.limit.For(a.key)
	}
	return request.Plan(a.plan).Cost(a.cost)
}

func requests(asks []ask) []ratelimit.Request {
	all := make([]ratelimit.Request, len(asks))
	for i, a := range asks {
		all[i] = a.request()
	}
	return all
}
