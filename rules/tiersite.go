package rules

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// Site turns each request to a site into requests to limits, by the tiers that a [Set] has loaded. It's safe for
// concurrent use, and uses new tiers as soon as the Set has loaded them.
//
// If they name an unknown attribute or an unknown limit, the tiers before stay in effect, and the Set's Observer
// receives the error. If there are none before, Requests returns an error.
type Site struct {
	set     *Set
	config  SiteConfig
	current atomic.Pointer[siteTiers]
	making  sync.Mutex // held by who makes the next
}

// SiteConfig is what a program knows of its tiers. Its zero value is ready for use.
type SiteConfig struct {
	// Limits are the limits that the program defines. Tiers can name these, and limits with a stored rule. If a limit
	// isn't defined and has rules for plans only, every other plan gets the rule with the smallest capacity.
	Limits []ratelimit.Limit
	// Attributes are the names that Attributes.More has, such as "region" or "header:x-api-key".
	Attributes []string
	// Tiers apply while the table has none, also before the first load. Their limits are of Limits. Defaults to none.
	Tiers TierSet
}

// siteTiers are the tiers that were made of what a Set had loaded.
type siteTiers struct {
	of    *snapshot
	until int64 // when a stand-in in them may change next
	tiers *readyTiers
	err   error // where there are none
}

// isFor reports whether they are the tiers of what is loaded, now.
func (t *siteTiers) isFor(loaded *snapshot) bool {
	return t.of == loaded && (t.until == maxInstant || loaded.clock() < t.until)
}

// NewSite returns a Site for the tiers that set loads. An error wraps ErrInvalidConfig or ErrInvalid. Call Set.Load
// before: if the loaded tiers are invalid, and SiteConfig has none, NewSite returns the error, and no request fails
// later.
func NewSite(set *Set, config SiteConfig) (*Site, error) {
	if set == nil {
		return nil, fmt.Errorf("%w: the Set is nil; pass what NewSet returned", ErrInvalidConfig)
	}
	// the caller may go on with its own
	config.Limits, config.Attributes = slices.Clone(config.Limits), slices.Clone(config.Attributes)
	s := &Site{set: set, config: config}
	tiers, err := newTiers(config.Tiers, s.limitIn(nil, 0), config.Attributes...)
	if err != nil {
		return nil, fmt.Errorf("field Tiers: %w", err)
	}
	first := &siteTiers{tiers: tiers, until: maxInstant}
	if len(config.Tiers.Tiers) == 0 {
		first = &siteTiers{until: maxInstant, err: errors.New("rules: the tiers are not loaded yet; call Set.Load, or " +
			"Set.Run on a goroutine of its own")}
	}
	s.current.Store(first)
	if set.current.Load() != nil {
		if loaded := s.renew(); loaded.err != nil {
			return nil, fmt.Errorf("the tiers that the Set has loaded: %w", loaded.err)
		}
	}
	return s, nil
}

// Requests returns the requests to the limits, for one Take, which takes from all of them or from none. The rules of
// a.Plan decide. stated returns what the request states for a CostSource, such as the header's values for
// "header:x-cost"; nil states nothing.
//
// Requests never share a bucket by mistake. If the request lacks an attribute in the key of a tier that fits, the error
// wraps ratelimit.ErrInvalidKey: for requests without that attribute make a tier whose When has it as "", before or
// beside the tier whose When has it as "*". If a tier is for a route and the request has none, the error wraps
// ratelimit.ErrInvalidRequest. If no tier fits it's ErrNoTier. No error contains an attribute's value.
//
// Before the Set's first load, and while the loaded tiers are invalid, it returns an error, unless there are earlier
// tiers or SiteConfig.Tiers.
func (s *Site) Requests(a Attributes, stated func(source string) []string) ([]ratelimit.Request, error) {
	if s == nil || s.set == nil {
		return nil, fmt.Errorf("%w: the Site was not made by NewSite; use the one that NewSite returned", ErrInvalidConfig)
	}
	current := s.current.Load()
	if !current.isFor(s.set.current.Load()) {
		current = s.renew()
	}
	if current.err != nil {
		return nil, current.err
	}
	return current.tiers.requests(a, stated)
}

// renew makes tiers of the loaded ones and of the stand-ins of now, unless another goroutine has.
func (s *Site) renew() *siteTiers {
	s.making.Lock()
	defer s.making.Unlock()
	current, loaded := s.current.Load(), s.set.current.Load()
	if current.isFor(loaded) {
		return current
	}
	at := loaded.clock()
	set := loaded.tiers
	if len(set.Tiers) == 0 {
		set = s.config.Tiers
	}
	next := &siteTiers{of: loaded, until: maxInstant}
	for i := range set.Tiers {
		if of := loaded.limits[set.Tiers[i].Limit]; of != nil {
			next.until = min(next.until, of.standIn(at).until)
		}
	}
	next.tiers, next.err = newTiers(set, s.limitIn(loaded, at), s.config.Attributes...)
	if next.err != nil {
		s.set.tell(context.Background(), event.RulesLoaded{Version: loaded.version, Err: next.err})
		if current.err == nil {
			next.tiers, next.err = current.tiers, nil
		}
	}
	s.current.Store(next)
	return next
}

// limitIn returns a function that finds the limits of the program and of the loaded rules, which may be nil, at an
// instant.
func (s *Site) limitIn(loaded *snapshot, at int64) func(name string) (ratelimit.Limit, bool) {
	return func(name string) (ratelimit.Limit, bool) {
		for _, limit := range s.config.Limits {
			if limit.Name() == name {
				return limit, true
			}
		}
		return loaded.limit(name, at)
	}
}
