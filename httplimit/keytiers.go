package httplimit

import (
	"errors"
	"fmt"
	"maps"
	"net/http"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Tiers returns what picks a request's limit by its tier: a plan, or a claim of a token. Which tier it is
// comes from choose, a Key, and decides only which of the limits applies, not whose bucket it is. A request
// without a tier, or with one that has no limit, gets fallback, so make that the smallest; a bad tier
// (ErrBadKey) is an error.
//
// Buckets belong to a limit's name: with a name for each tier, who changes tiers starts with a full bucket. Where the
// limiter has Config.Policies, [Rule.Plan] gives the tiers of one name policies of their own.
//
// It panics when choose is nil or a limit is the zero Limit.
func Tiers(limits map[string]ratelimit.Limit, choose Key, fallback ratelimit.Limit) func(*http.Request) (ratelimit.Limit, error) {
	if choose == nil {
		panic("httplimit: Tiers: choose is nil")
	}
	if fallback.Policy() == nil {
		panic("httplimit: Tiers: fallback is the zero Limit; make it with ratelimit.Define")
	}
	for tier, limit := range limits {
		if limit.Policy() == nil {
			panic(fmt.Sprintf("httplimit: Tiers: the limit of %.80q is the zero Limit; make it with ratelimit.Define", tier))
		}
	}
	limits = maps.Clone(limits)
	return func(r *http.Request) (ratelimit.Limit, error) {
		tier, err := choose(r)
		if err != nil && !errors.Is(err, ErrNoKey) {
			return ratelimit.Limit{}, fmt.Errorf("choose the tier: %w", err)
		}
		if limit, found := limits[tier]; found && err == nil {
			return limit, nil
		}
		return fallback, nil
	}
}
