// Package take has calls that combine several: take the units that are available, wait for tokens, or take from a
// guarantee before a pool.
//
//	n, d, err := take.UpTo(ctx, limiter, len(queue), Mails.For(sender))
//	d, err := take.Wait(ctx, limiter, Calls.Global())
//	d, err := take.Borrow(ctx, limiter, 1, Guarantee.For(tenant), Pool.Global())
//
// The functions use only a [ratelimit.Limiter]'s public calls, so an Observer and Config.Refused receive each of them,
// even a Take that is refused before the function goes on. Errors are those calls' errors: treat one as a refusal.
package take

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// UpTo takes as many units as are available, up to n. With several limits it takes only units that all of them have. A
// unit's price is the requests' costs. It takes only whole units, and because a fraction stays in the bucket, repeated
// calls reach the limit's rate.
//
//	n, d, err := take.UpTo(ctx, limiter, len(queue), Mails.For(sender), Bytes.For(sender).Cost(size))
//
// It returns the number of units taken. If that is 0, the decision is a refusal, and RetryAfter is the time until one
// unit is available. Otherwise the decision is allowed, and each State's Cost is for all units. A limit in shadow
// doesn't reduce the number; if it has too few tokens for all units, nothing is taken from it.
//
// UpTo takes n units, and if that is refused, the units that are left: one Take if there are enough, and otherwise two.
// If other callers take in between, it asks up to two times more, in the end for one unit, so it can take fewer units
// than there were. It returns Take's errors, ErrInvalidRequest if n is below 1, and ErrInvalidCost if a unit costs
// nothing.
func UpTo(
	ctx context.Context, l *ratelimit.Limiter, n int, requests ...ratelimit.Request,
) (taken int, d ratelimit.Decision, err error) {
	if n < 1 {
		return 0, d, fmt.Errorf("%w: take up to %d units; ask for 1 or more", ratelimit.ErrInvalidRequest, n)
	}
	const mostUnits, mostTakes = int64(1 << 53), 4 // float64 represents these numbers of units exactly
	units := int(min(int64(n), mostUnits))
	for takes := 1; ; {
		d, err = l.Take(ctx, times(requests, units)...)
		var tooMuch *ratelimit.CapacityError
		switch {
		case errors.As(err, &tooMuch) && units > 1: // which sent nothing
			units = fewer(units, tooMuch.Most, tooMuch.Cost)
			continue
		case err != nil:
			return 0, d, err
		case isFree(d):
			return 0, ratelimit.Decision{}, fmt.Errorf("%w: units that cost nothing; the cost of a request is the price of "+
				"one unit",
				ratelimit.ErrInvalidCost)
		case d.Allowed:
			return units, d, nil
		case units == 1:
			return 0, d, nil
		}
		if takes++; takes < mostTakes {
			units = left(l, units, d, requests)
		} else {
			units = 1
		}
	}
}

// times returns the requests for that many units.
func times(requests []ratelimit.Request, units int) []ratelimit.Request {
	all := make([]ratelimit.Request, len(requests))
	for i, r := range requests {
		all[i] = r.Times(float64(units))
	}
	return all
}

// isFree reports whether all requests of a decision cost nothing.
func isFree(d ratelimit.Decision) bool {
	for i := range d.States {
		if d.States[i].Cost > 0 {
			return false
		}
	}
	return true
}

// left returns how many units the limits may have, at least one, after they refused more.
func left(l *ratelimit.Limiter, units int, d ratelimit.Decision, requests []ratelimit.Request) int {
	type bucket struct{ name, key string }
	buckets, costs := make([]bucket, len(requests)), map[bucket]float64{}
	for i, r := range requests {
		key, _ := l.StoredKey(r) // the Take has checked it
		buckets[i] = bucket{r.Limit().Name(), key}
		costs[buckets[i]] += d.States[i].Cost
	}
	least := units
	for i := range d.States {
		if s := &d.States[i]; !s.Allowed && s.Mode == ratelimit.On {
			least = min(least, fewer(units, s.Remaining, costs[buckets[i]]))
		}
	}
	return least
}

// fewer returns how many units tokens may pay, at least one. They are fewer than the cost of units. A number that is
// too high by a rounding error is refused.
func fewer(units int, tokens, cost float64) int {
	if !(cost > 0) { // a pause refused, so nothing was charged
		return 1
	}
	return max(1, min(units-1, int(math.Floor(float64(units)*tokens/cost*(1+1e-12)))))
}
