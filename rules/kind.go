package rules

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Adaptive is how the price of a request follows what an upstream accepts, as ratelimit.Adaptive has it.
type Adaptive struct {
	// Floor is the smallest share of the contract that the price leaves. Defaults to 0.1.
	Floor float64
	// Growth is the share of the contract that is gained back each second without throttling. Defaults to 0.04.
	Growth float64
	// Epoch is how long outcomes are collected before the price changes. Defaults to 2s.
	Epoch time.Duration
	// Apply charges the price. Without it the price is only worked out and told.
	Apply bool
}

// What the core takes where nothing is said.
const (
	defaultSlices = 60
	defaultLease  = time.Minute
	defaultZone   = "UTC"
	defaultFloor  = 0.1
	defaultGrowth = 0.04
	defaultEpoch  = 2 * time.Second
)

// WithDefaults returns the rule with every default written out but those that are nil.
func (r Rule) WithDefaults() Rule {
	r.Kind = cmp.Or(r.Kind, TokenBucket)
	r.Shards = cmp.Or(r.Shards, 1)
	r.Mode = cmp.Or(r.Mode, ratelimit.On)
	r.OnChange = cmp.Or(r.OnChange, ratelimit.KeepTokens)
	switch r.Kind {
	case SlidingWindow:
		r.Slices = cmp.Or(r.Slices, defaultSlices)
	case CalendarWindow:
		r.Zone = cmp.Or(r.Zone, defaultZone)
		if hasDay(r.Resets) {
			r.FirstDay = cmp.Or(r.FirstDay, 1)
		}
		if hasMonth(r.Resets) {
			r.FirstMonth = cmp.Or(r.FirstMonth, time.January)
		}
	case Concurrency:
		r.Lease = cmp.Or(r.Lease, defaultLease)
	case TokenBucket, FixedWindow:
	}
	if a := r.Adaptive; a != nil {
		r.Adaptive = &Adaptive{cmp.Or(a.Floor, defaultFloor), cmp.Or(a.Growth, defaultGrowth), cmp.Or(a.Epoch, defaultEpoch), a.Apply}
	}
	return r
}

// hasDay reports whether windows begin on a day of the month that can be chosen.
func hasDay(c ratelimit.Calendar) bool { return c == ratelimit.Monthly || hasMonth(c) }

// hasMonth reports whether windows begin in a month that can be chosen.
func hasMonth(c ratelimit.Calendar) bool { return c == ratelimit.Quarterly || c == ratelimit.Yearly }

// kinds returns all kinds, as errors and files name them.
func kinds() []Kind {
	return []Kind{TokenBucket, FixedWindow, SlidingWindow, CalendarWindow, Concurrency}
}

// checkFields returns an error for a field that means nothing for the kind of the rule.
func (r *Rule) checkFields() error {
	kind := cmp.Or(r.Kind, TokenBucket)
	if !slices.Contains(kinds(), kind) {
		return fmt.Errorf("its Kind is %.40q; use one of %q", string(r.Kind), kinds())
	}
	steps := kind == TokenBucket || kind == FixedWindow
	calendar := kind == CalendarWindow
	for _, field := range []struct {
		name        string
		said, meant bool
	}{
		{"Rate", r.Rate != 0, kind != Concurrency},
		{"Period", r.Period != 0, kind != Concurrency && !calendar},
		{"Capacity", r.Capacity != nil, steps},
		{"MaxReserved", r.MaxReserved != nil, steps || calendar},
		{"Shards", r.Shards != 0 && r.Shards != 1, steps},
		{"Start", !r.Start.IsZero(), kind == FixedWindow},
		{"Slices", r.Slices != 0, kind == SlidingWindow},
		{"Resets", r.Resets != "", calendar},
		{"Zone", r.Zone != "", calendar},
		{"Most", r.Most != 0, kind == Concurrency},
		{"Lease", r.Lease != 0, kind == Concurrency},
		{"Adaptive", r.Adaptive != nil, steps || calendar},
	} {
		if field.said && !field.meant {
			return fmt.Errorf("its %s means nothing for a %s; leave it out, or use another kind", field.name, kind)
		}
	}
	for _, field := range []struct {
		name        string
		said, meant bool
	}{
		{"FirstWeekday", r.FirstWeekday != 0, calendar && r.Resets == ratelimit.Weekly},
		{"FirstDay", r.FirstDay != 0, calendar && hasDay(r.Resets)},
		{"FirstMonth", r.FirstMonth != 0, calendar && hasMonth(r.Resets)},
	} {
		if field.said && !field.meant {
			return fmt.Errorf("its %s means nothing for a %s; leave it out, or use another Resets", field.name, strings.TrimSpace(string(kind)+" of a "+string(r.Resets)))
		}
	}
	return nil
}

// policy returns the numbers of the rule as the core has them.
func (r *Rule) policy() (ratelimit.Policy, error) {
	if err := r.checkFields(); err != nil {
		return nil, err
	}
	capacity, err := amount("Capacity", r.Capacity, ratelimit.NoCapacity)
	if err != nil {
		return nil, err
	}
	maxReserved, err := amount("MaxReserved", r.MaxReserved, ratelimit.NoDebt)
	if err != nil {
		return nil, err
	}
	var policy ratelimit.Policy
	switch r.Kind {
	case "", TokenBucket:
		policy = ratelimit.TokenBucket{
			Rate: r.Rate, Period: r.Period, Capacity: capacity, MaxReserved: maxReserved, Shards: r.Shards,
		}
	case FixedWindow:
		policy = ratelimit.FixedWindow{
			Rate: r.Rate, Period: r.Period, Capacity: capacity, MaxReserved: maxReserved, Shards: r.Shards, Start: r.Start,
		}
	case SlidingWindow:
		policy = ratelimit.SlidingWindow{Rate: r.Rate, Period: r.Period, Slices: r.Slices}
	case CalendarWindow:
		policy = ratelimit.CalendarWindow{
			Rate: r.Rate, Resets: r.Resets, Zone: r.Zone, FirstWeekday: r.FirstWeekday, FirstDay: r.FirstDay, FirstMonth: r.FirstMonth,
			MaxReserved: maxReserved,
		}
	case Concurrency:
		policy = ratelimit.Concurrency{Most: r.Most, Lease: r.Lease}
	}
	if a := r.Adaptive; a != nil {
		policy = ratelimit.Adaptive{Contract: policy, Floor: a.Floor, Growth: a.Growth, Epoch: a.Epoch, Apply: a.Apply}
	}
	return policy, nil
}

// FromLimit returns a rule that says what a limit is defined with, for all its keys: the reverse of [Rule.AsLimit]. A
// policy that no rule can say, as one with ratelimit.NoReservations or with a Prefetch, becomes the one that is nearest to it.
func FromLimit(limit ratelimit.Limit) Rule {
	r := Rule{Limit: limit.Name(), Kind: TokenBucket}
	policy := limit.Policy()
	if p, ok := policy.(ratelimit.Adaptive); ok {
		r.Adaptive = &Adaptive{p.Floor, p.Growth, p.Epoch, p.Apply}
		policy = p.Contract
	}
	switch p := policy.(type) {
	case ratelimit.TokenBucket:
		r.Rate, r.Period, r.Shards, r.Capacity, r.MaxReserved = p.Rate, p.Period, p.Shards, storedAmount(p.Capacity), storedAmount(p.MaxReserved)
	case ratelimit.FixedWindow:
		r.Kind, r.Start = FixedWindow, p.Start
		r.Rate, r.Period, r.Shards, r.Capacity, r.MaxReserved = p.Rate, p.Period, p.Shards, storedAmount(p.Capacity), storedAmount(p.MaxReserved)
	case ratelimit.SlidingWindow:
		r.Kind, r.Rate, r.Period, r.Slices = SlidingWindow, p.Rate, p.Period, p.Slices
	case ratelimit.CalendarWindow:
		r.Kind, r.Rate, r.Resets, r.Zone, r.MaxReserved = CalendarWindow, p.Rate, p.Resets, p.Zone, storedAmount(p.MaxReserved)
		r.FirstWeekday, r.FirstDay, r.FirstMonth = p.FirstWeekday, p.FirstDay, p.FirstMonth
	case ratelimit.Concurrency:
		r.Kind, r.Most, r.Lease = Concurrency, p.Most, p.Lease
	}
	return r
}

// storedAmount is the reverse of amount: nil for the default, and 0 for none.
func storedAmount(tokens float64) *float64 {
	if tokens == 0 {
		return nil
	}
	return new(max(tokens, 0))
}
