package rls

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	commonv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/address"
	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

const (
	maxDescriptors = 64 // a call asks for up to 64 limits
	maxEntries     = 64
)

// check returns an error for a call that cannot be decided.
func check(call *ratelimitv3.RateLimitRequest) error {
	switch n := len(call.GetDescriptors()); {
	case call.GetDomain() == "":
		return errors.New("rate limit domain must not be empty")
	case n == 0:
		return errors.New("rate limit descriptor list must not be empty")
	case n > maxDescriptors:
		return fmt.Errorf("the call has %d descriptors; send up to %d", n, maxDescriptors)
	}
	for i, d := range call.GetDescriptors() {
		seen := make(map[string]bool, len(d.GetEntries()))
		if len(d.GetEntries()) > maxEntries {
			return fmt.Errorf("descriptor %d has %d entries; send up to %d", i, len(d.GetEntries()), maxEntries)
		}
		for _, e := range d.GetEntries() {
			if seen[e.GetKey()] {
				return fmt.Errorf("descriptor %d has two entries %.40q; give each a key of its own", i, e.GetKey())
			}
			seen[e.GetKey()] = true
		}
	}
	return nil
}

// ask has the requests of a descriptor.
type ask struct {
	requests []ratelimit.Request // none: no limit applies
	change   change
}

// change is how the hits of a descriptor change its buckets.
type change int

const (
	taken    change = iota // taken if there are enough tokens
	charged                // always taken
	credited               // returned
)

// asks returns the requests of each descriptor.
func (s *Service) asks(call *ratelimitv3.RateLimitRequest) ([]ask, error) {
	if err := check(call); err != nil {
		return nil, fmt.Errorf("%w: %w", ratelimit.ErrInvalidRequest, err)
	}
	domain, known := s.domains[call.GetDomain()]
	asked := make([]ask, len(call.GetDescriptors()))
	for i, d := range call.GetDescriptors() {
		requests, err := requestsOf(domain.Site, known, call.GetDomain(), d)
		if err != nil {
			return nil, fmt.Errorf("descriptor %d: %w", i, err)
		}
		hits := float64(max(call.GetHitsAddend(), 1))
		if d.GetHitsAddend() != nil { // 0 only checks
			hits = float64(d.GetHitsAddend().GetValue())
		}
		for j := range requests {
			requests[j] = requests[j].Times(hits)
		}
		asked[i].requests = requests
		switch {
		case d.GetIsNegativeHits():
			asked[i].change = credited
		case domain.Charge:
			asked[i].change = charged
		}
	}
	return asked, nil
}

// requestsOf returns the requests of a descriptor at the cost of one hit.
func requestsOf(site *rules.Site, known bool, domain string,
	d *commonv3.RateLimitDescriptor,
) ([]ratelimit.Request, error) {
	if override := d.GetLimit(); override != nil {
		request, err := overridden(domain, d)
		return []ratelimit.Request{request}, err
	}
	if !known {
		return nil, nil
	}
	requests, err := site.Requests(attributesOf(d), nil)
	if errors.Is(err, rules.ErrNoTier) {
		return nil, nil
	}
	return requests, err
}

func attributesOf(d *commonv3.RateLimitDescriptor) rules.Attributes {
	a := rules.Attributes{More: make(map[string]string, len(d.GetEntries()))}
	for _, e := range d.GetEntries() {
		switch e.GetKey() {
		case "user":
			a.User = e.GetValue()
		case "tenant":
			a.Tenant = e.GetValue()
		case "plan":
			a.Plan = e.GetValue()
		case "address":
			a.Address = e.GetValue()
		case "route":
			a.Route = e.GetValue()
		default:
			a.More[e.GetKey()] = e.GetValue()
		}
	}
	return a
}

// overridden returns the request for the limit in a descriptor.
func overridden(domain string, d *commonv3.RateLimitDescriptor) (ratelimit.Request, error) {
	limit, err := limitIn(d.GetLimit())
	if err != nil {
		return ratelimit.Request{}, err
	}
	parts := []string{domain}
	for _, e := range d.GetEntries() {
		value := e.GetValue()
		if address.IsAttribute(e.GetKey()) {
			if value, err = address.Key(value, address.IPv4Bits, address.IPv6Bits); err != nil {
				return ratelimit.Request{}, fmt.Errorf("%w: the entry %q is %w", ratelimit.ErrInvalidKey, e.GetKey(), err)
			}
		}
		parts = append(parts, e.GetKey(), "="+value) // no part is empty
	}
	sum := sha256.Sum256([]byte(ratelimit.Join(parts...)))
	return limit.For(base64.RawURLEncoding.EncodeToString(sum[:])), nil
}

// longestPeriod is the longest period of a limit.
const longestPeriod = 36525 * ratelimit.Day

// limitIn returns the limit of an override: a fixed window from 1970 on. A limit of 0 allows nothing.
func limitIn(override *commonv3.RateLimitDescriptor_RateLimitOverride) (ratelimit.Limit, error) {
	n, times := override.GetRequestsPerUnit(), max(override.GetUnitMultiplier().GetValue(), 1)
	for _, u := range units() {
		name := u.unit.String()
		switch {
		case override.GetUnit().String() != name:
			continue
		case time.Duration(times) > longestPeriod/u.length:
			return ratelimit.Limit{}, fmt.Errorf("%w: the override's period is %d times a %s; use up to 100 years",
				ratelimit.ErrInvalidRequest, times, strings.ToLower(name))
		case times > 1:
			name = strconv.FormatUint(uint64(times), 10) + name
		}
		policy := ratelimit.FixedWindow{Rate: float64(n), Period: time.Duration(times) * u.length, Start: time.Unix(0, 0)}
		if n == 0 {
			policy.Rate, policy.Capacity = 1, ratelimit.None
		}
		return ratelimit.NewLimit(fmt.Sprintf("override.%d.%s", n, strings.ToLower(name)), policy)
	}
	return ratelimit.Limit{}, fmt.Errorf("%w: the override has the unit %v; use second, minute, hour, day, month or year",
		ratelimit.ErrInvalidRequest, override.GetUnit())
}

// decide decides on all descriptors together. The decision has a state for each of their requests, in order.
func decide(ctx context.Context, limiter *ratelimit.Limiter, asked []ask) (ratelimit.Decision, error) {
	for _, r := range requestsIn(asked, taken, charged, credited) {
		if guard.IsHeld(limiter.Resolve(r)) { // a mistake of who wrote the rule, and not of Envoy
			return ratelimit.Decision{}, fmt.Errorf("the limit %q has slots, which Envoy can't release; give it a rule of "+
				"another kind", r.Limit().Name())
		}
	}
	if !slices.ContainsFunc(asked, func(a ask) bool { return a.change != taken && len(a.requests) > 0 }) {
		return take(ctx, limiter, requestsIn(asked, taken))
	}
	var d, changed ratelimit.Decision
	err := limiter.InTx(ctx, func(tx pgx.Tx) (err error) {
		limiter := limiter.WithTx(tx)
		if d, err = take(ctx, limiter, requestsIn(asked, taken)); err != nil {
			return err
		}
		if d.Allowed {
			if err = apply(ctx, limiter, asked); err != nil {
				return err
			}
		}
		looked := requestsIn(asked, charged, credited)
		for i := range looked {
			looked[i] = looked[i].Cost(0)
		}
		changed, err = limiter.Check(ctx, looked...)
		return err
	})
	return joined(asked, d, changed), err
}

// apply credits and charges what asked says.
func apply(ctx context.Context, limiter *ratelimit.Limiter, asked []ask) (err error) {
	if credits := requestsIn(asked, credited); len(credits) > 0 {
		err = limiter.Credit(ctx, credits...)
	}
	if charges := requestsIn(asked, charged); err == nil && len(charges) > 0 {
		err = limiter.Charge(ctx, charges...)
	}
	return err
}

// requestsIn returns the requests with one of the changes.
func requestsIn(asked []ask, changes ...change) (requests []ratelimit.Request) {
	for _, a := range asked {
		if slices.Contains(changes, a.change) {
			requests = append(requests, a.requests...)
		}
	}
	return requests
}

// take is Take, and allows a call without requests. It refuses a call that asks for more than a limit can ever give.
func take(ctx context.Context, limiter *ratelimit.Limiter, requests []ratelimit.Request) (ratelimit.Decision, error) {
	if len(requests) == 0 {
		return ratelimit.Decision{Allowed: true}, nil
	}
	d, err := limiter.Take(ctx, requests...)
	if errors.Is(err, ratelimit.ErrCostExceedsCapacity) {
		return tooCostly(ctx, limiter, requests)
	}
	return d, err
}

// tooCostly returns the refusal of requests of which one asks, alone or with others of its bucket, for more than its
// limit can ever give. Its wait is 0, because waiting does not help.
func tooCostly(ctx context.Context, limiter *ratelimit.Limiter,
	requests []ratelimit.Request,
) (all ratelimit.Decision, err error) {
	for _, r := range requests {
		d, err := limiter.Check(ctx, inBucket(limiter, r, requests)...)
		if errors.Is(err, ratelimit.ErrCostExceedsCapacity) {
			if d, err = limiter.Check(ctx, r.Cost(0)); err == nil {
				d.States[0].Allowed, d.States[0].RetryAfter = d.States[0].Mode != ratelimit.On, 0
			}
		}
		if err != nil {
			return ratelimit.Decision{}, err
		}
		all.States = append(all.States, d.States[0]) // those of one bucket are alike
	}
	return all, nil
}

// inBucket returns the requests of all for the bucket of r.
func inBucket(limiter *ratelimit.Limiter, r ratelimit.Request, all []ratelimit.Request) (same []ratelimit.Request) {
	key, err := limiter.StoredKey(r)
	if err != nil {
		return []ratelimit.Request{r} // the call returns that error, too
	}
	for _, other := range all {
		at, err := limiter.StoredKey(other)
		if err == nil && at == key && other.Limit().Name() == r.Limit().Name() {
			same = append(same, other)
		}
	}
	return same
}

// joined returns the decision d with the states of changed in the places of their descriptors. Hits that were not taken
// refuse nothing.
func joined(asked []ask, d, changed ratelimit.Decision) ratelimit.Decision {
	var states []ratelimit.State
	for _, a := range asked {
		from := &d.States
		if a.change != taken {
			from = &changed.States
		}
		n := min(len(a.requests), len(*from))
		for _, state := range (*from)[:n] {
			state.Allowed = state.Allowed || a.change != taken
			states = append(states, state)
		}
		*from = (*from)[n:]
	}
	d.States = states
	return d
}
