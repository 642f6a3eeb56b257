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

// Rule says which limit a request takes from, whose bucket of it, and how much.
type Rule struct {
	// Limit is the limit. Each rule has one of its own: what differs between requests is the cost or the key. One with a
	// [ratelimit.Concurrency] has slots that the request holds while its handler runs; its cost is how many.
	Limit ratelimit.Limit
	// LimitFor chooses the limit by the request, as for the plans of customers, in place of Limit. Give the
	// limits of different plans different names: under one name a caller who changes plans keeps the bucket,
	// which then has two policies. For plans under one name, see Plan. A limit that another rule has for the same
	// request is a mistake, and so is the zero Limit: nobody passes then. Errors are answered as those of Key.
	LimitFor func(r *http.Request) (ratelimit.Limit, error)
	// Key says who pays. An error that wraps ErrNoKey or ErrBadKey is answered 400, any other 503, also with
	// FailOpen: nobody shares a bucket by mistake, and nobody passes without one.
	Key Key
	// Plan says which plan the caller is on, as your own code has verified it: see [ratelimit.Request.Plan]. A caller on
	// none (ErrNoKey) is asked without one; other errors are answered as those of Key. Defaults to nil, no plan.
	Plan Key
	// Global makes everybody pay from one bucket, in place of Key.
	Global bool
	// Cost is how much a request takes. Defaults to FixedCost(1).
	Cost Cost
	// When reports whether the rule applies to a request. Defaults to nil, always.
	When func(r *http.Request) bool
	// Credit reports, by the status of the response, whether the request gets back what it took: see
	// [CreditOn5xx] and [CountOnlyFailures]. Slots go back in any case. Defaults to nil, never.
	Credit Credit
	// Unit is what the limit counts, as the headers name it: lower-case letters, digits and hyphens, as in
	// "tokens" or "content-bytes". Defaults to requests.
	Unit string
	// Abuse words a refusal as detected abuse rather than as an exceeded quota.
	Abuse bool
}

const maxRules = 64 // limits in one call of the core

var validUnit = regexp.MustCompile(`^[a-z0-9-]{1,32}$`)

// validate returns an error unless every request can be asked by the rule.
func (r *Rule) validate() error {
	hasLimit := r.Limit.Policy() != nil
	switch {
	case hasLimit == (r.LimitFor != nil):
		return errors.New("it needs a Limit, made with ratelimit.Define, or a LimitFor, and not both")
	case r.Global == (r.Key != nil):
		return errors.New("it needs a Key that says who pays, or Global for one bucket for everybody, and not both")
	case r.Unit != "" && !validUnit.MatchString(r.Unit):
		return fmt.Errorf("its Unit is %.40q; use up to 32 lower-case letters, digits and hyphens", r.Unit)
	}
	if r.Credit != nil && guard.IsHeld(r.Limit) {
		return errors.New("it has a Credit, and slots go back in any case when the handler has returned; leave Credit out")
	}
	if v, ok := r.Cost.(interface{ validate() error }); ok {
		if err := v.validate(); err != nil {
			return err
		}
	}
	return nil
}

// validateCapacity returns an error when the Limit, as it is defined, could never take a cost that is known already.
func (r *Rule) validateCapacity() error {
	if r.Limit.Policy() == nil {
		return nil
	}
	if r.Limit.Capacity() == 0 {
		return errors.New("its limit has NoCapacity, from which only reservations can take")
	}
	cost := r.Cost
	if cost == nil {
		cost = FixedCost(1)
	}
	if known, ok := cost.(interface{ static() []staticCost }); ok {
		for _, c := range known.static() {
			if err := c.validate(r.Limit); err != nil {
				return err
			}
		}
	}
	return nil
}

// validateRules checks the rules, each and beside the others, and their costs beside their limits, unless the limiter has
// policies that may have other capacities.
func validateRules(rules []Rule, hasPolicies bool) error {
	if len(rules) > maxRules {
		return fmt.Errorf("field Rules has %d; use up to %d", len(rules), maxRules)
	}
	seen := make(map[string]bool, len(rules))
	for i := range rules {
		name := rules[i].Limit.Name()
		err := rules[i].validate()
		if err == nil && !hasPolicies {
			err = rules[i].validateCapacity()
		}
		if err != nil {
			return fmt.Errorf("field Rules[%d]%s: %w", i, inParentheses(name), err)
		}
		if name != "" && seen[name] {
			return fmt.Errorf("field Rules[%d]: an earlier rule has the limit %q; define one with a name of its own, "+
				"or let one rule choose the key or the cost by the request", i, name)
		}
		seen[name] = true
	}
	return nil
}

func inParentheses(name string) string {
	if name == "" {
		return ""
	}
	return " (" + name + ")"
}

// ask is what one rule asks of its limit for one request.
type ask struct {
	rule  *Rule
	index int // of the rule
	limit ratelimit.Limit
	key   string // empty when the rule is global
	plan  string // empty when there is none
	cost  float64
	price float64            // that it was taken at; 0: that which holds
	given *ratelimit.Request // by Config.Requests; nil when it is made of the rest
}

// ask returns what the rule, which is Rules[index], asks for a request, and otherwise the reason why it cannot.
func (r *Rule) ask(request *http.Request, index int) (ask, *fault) {
	a := ask{rule: r, index: index, limit: r.Limit, cost: 1}
	var err error
	if r.LimitFor != nil {
		if a.limit, err = r.LimitFor(request); err != nil {
			return ask{}, unasked(ask{}, err)
		}
		if a.limit.Policy() == nil {
			return ask{}, unasked(a, fmt.Errorf("%w: Rules[%d].LimitFor returned the zero Limit; make limits with ratelimit.Define",
				ratelimit.ErrInvalidLimit, index))
		}
	}
	if r.Key != nil {
		if a.key, err = r.Key.Of(request); err != nil {
			return ask{}, unasked(a, err)
		}
	}
	if r.Plan != nil {
		if a.plan, err = r.Plan.Of(request); err != nil && !errors.Is(err, ErrNoKey) {
			return ask{}, unasked(a, err)
		}
	}
	if r.Cost != nil {
		if a.cost, err = r.Cost.Of(request); err != nil {
			return ask{}, unasked(a, err)
		}
		a.cost = min(a.cost, math.MaxFloat64) // what is infinite is too much, and no mistake
	}
	return a, nil
}

// apart returns the fault of an ask for a limit that one of the others asks too, and nil when there is none.
func (a *ask) apart(others []ask) *fault {
	for i := range others {
		if others[i].limit.Name() == a.limit.Name() {
			return unasked(*a, fmt.Errorf("%w: Rules[%d] and Rules[%d] have the limit %q for one request; give the limits of each rule names of their own",
				ratelimit.ErrInvalidRequest, others[i].index, a.index, a.limit.Name()))
		}
	}
	return nil
}

// unasked returns the fault of a request whose limit, key or cost is an error. a has the parts that are known.
func unasked(a ask, err error) *fault {
	result, ofRequest := requestFault(err)
	if !ofRequest {
		result = guard.FailedClosed
	}
	return &fault{result: result, limit: a.limit, key: a.key, plan: a.plan, err: err}
}

// requestFault returns what is wrong with a request by an error, and whether it is the request's fault.
func requestFault(err error) (result string, ofRequest bool) {
	switch {
	case errors.Is(err, ErrNoKey), errors.Is(err, ErrBadKey):
		return guard.BadKey, true
	case errors.Is(err, ErrInvalidCost):
		return guard.BadCost, true
	}
	return guard.Fault(err)
}

// request returns what the core is asked.
func (a ask) request() ratelimit.Request {
	if a.given != nil {
		return a.given.Price(a.price)
	}
	request := a.limit.Global()
	if !a.rule.Global {
		request = a.limit.For(a.key)
	}
	return request.Plan(a.plan).Cost(a.cost).Price(a.price)
}

// requests returns what the core is asked by all of asks.
func requests(asks []ask) []ratelimit.Request {
	all := make([]ratelimit.Request, len(asks))
	for i, a := range asks {
		all[i] = a.request()
	}
	return all
}
