package rules

import (
	"cmp"
	"errors"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// flat has the fields of all kinds of policy, as the columns of a table.
type flat struct {
	Kind                  ratelimit.Kind
	Rate                  float64
	Period                time.Duration
	Capacity, MaxReserved *float64
	Shards                int
	Start                 time.Time
	Slices                int
	Resets                ratelimit.Calendar
	Zone                  string
	FirstWeekday          time.Weekday
	FirstDay              int
	FirstMonth            time.Month
	Most                  int
	Lease                 time.Duration
	Adaptive              *ratelimit.Adaptive
}

// isStorable returns an error for a policy that the columns cannot hold.
func isStorable(policy ratelimit.Policy) error {
	var prefetch time.Duration
	var owed float64
	switch p := policy.(type) {
	case ratelimit.TokenBucket:
		prefetch, owed = p.Prefetch, p.MaxReserved
	case ratelimit.FixedWindow:
		prefetch, owed = p.Prefetch, p.MaxReserved
	case ratelimit.CalendarWindow:
		owed = p.MaxReserved
	case ratelimit.Adaptive:
		return isStorable(p.Contract)
	}
	switch {
	case prefetch != 0:
		return errors.New("its Policy has a Prefetch, which only a definition in the code can have; leave it out")
	case owed == ratelimit.NoReservations:
		return errors.New("its Policy has NoReservations, which only a definition in the code can have; use NoDebt")
	}
	return nil
}

// flatOf returns a policy with every default written out but those that are nil.
func flatOf(policy ratelimit.Policy) flat {
	r := flat{Kind: ratelimit.KindTokenBucket, Shards: 1}
	if p, ok := policy.(ratelimit.Adaptive); ok {
		r.Adaptive = &ratelimit.Adaptive{Floor: cmp.Or(p.Floor, 0.1), Growth: cmp.Or(p.Growth, 0.04), Epoch: cmp.Or(p.Epoch, 2*time.Second), Apply: p.Apply}
		policy = p.Contract
	}
	switch p := policy.(type) {
	case ratelimit.TokenBucket:
		r.Rate, r.Period, r.Shards, r.Capacity, r.MaxReserved = p.Rate, p.Period, max(p.Shards, 1), storedAmount(p.Capacity), storedAmount(p.MaxReserved)
	case ratelimit.FixedWindow:
		r.Kind, r.Start = ratelimit.KindFixedWindow, p.Start
		r.Rate, r.Period, r.Shards, r.Capacity, r.MaxReserved = p.Rate, p.Period, max(p.Shards, 1), storedAmount(p.Capacity), storedAmount(p.MaxReserved)
	case ratelimit.SlidingWindow:
		r.Kind, r.Rate, r.Period, r.Slices = ratelimit.KindSlidingWindow, p.Rate, p.Period, cmp.Or(p.Slices, 60)
	case ratelimit.CalendarWindow:
		r.Kind, r.Rate, r.Resets, r.Zone, r.MaxReserved = ratelimit.KindCalendarWindow, p.Rate, p.Resets, cmp.Or(p.Zone, "UTC"), storedAmount(p.MaxReserved)
		r.FirstWeekday, r.FirstDay, r.FirstMonth = p.FirstWeekday, p.FirstDay, p.FirstMonth
		if hasDay(r.Resets) {
			r.FirstDay = cmp.Or(r.FirstDay, 1)
		}
		if hasMonth(r.Resets) {
			r.FirstMonth = cmp.Or(r.FirstMonth, time.January)
		}
	case ratelimit.Concurrency:
		r.Kind, r.Most, r.Lease = ratelimit.KindConcurrency, p.Most, cmp.Or(p.Lease, time.Minute)
	}
	return r
}

// storedAmount returns nil for the default, and 0 for none.
func storedAmount(tokens float64) *float64 {
	if tokens == 0 {
		return nil
	}
	return new(max(tokens, 0))
}

// amountOf is the reverse of storedAmount.
func amountOf(tokens *float64, none float64) float64 {
	if tokens == nil {
		return 0
	}
	return cmp.Or(*tokens, none)
}

// hasDay reports whether windows begin on a day of the month that can be chosen.
func hasDay(c ratelimit.Calendar) bool { return c == ratelimit.Monthly || hasMonth(c) }

// hasMonth reports whether windows begin in a month that can be chosen.
func hasMonth(c ratelimit.Calendar) bool { return c == ratelimit.Quarterly || c == ratelimit.Yearly }

// policy returns the policy that the columns say; nil for a kind that there is not.
func (r *flat) policy() ratelimit.Policy {
	capacity, owed := amountOf(r.Capacity, ratelimit.NoCapacity), amountOf(r.MaxReserved, ratelimit.NoDebt)
	var policy ratelimit.Policy
	switch r.Kind {
	case ratelimit.KindTokenBucket:
		policy = ratelimit.TokenBucket{Rate: r.Rate, Period: r.Period, Capacity: capacity, MaxReserved: owed, Shards: r.Shards}
	case ratelimit.KindFixedWindow:
		policy = ratelimit.FixedWindow{Rate: r.Rate, Period: r.Period, Capacity: capacity, MaxReserved: owed, Shards: r.Shards, Start: r.Start}
	case ratelimit.KindSlidingWindow:
		policy = ratelimit.SlidingWindow{Rate: r.Rate, Period: r.Period, Slices: r.Slices}
	case ratelimit.KindCalendarWindow:
		policy = ratelimit.CalendarWindow{
			Rate: r.Rate, Resets: r.Resets, Zone: r.Zone, FirstWeekday: r.FirstWeekday, FirstDay: r.FirstDay, FirstMonth: r.FirstMonth, MaxReserved: owed,
		}
	case ratelimit.KindConcurrency:
		policy = ratelimit.Concurrency{Most: r.Most, Lease: r.Lease}
	}
	if a := r.Adaptive; a != nil {
		policy = ratelimit.Adaptive{Contract: policy, Floor: a.Floor, Growth: a.Growth, Epoch: a.Epoch, Apply: a.Apply}
	}
	return policy
}
