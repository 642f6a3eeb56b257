package rules

import (
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Kind is how the tokens of a limit arrive.
type Kind string

const (
	// TokenBucket is the kind of ratelimit.TokenBucket.
	TokenBucket Kind = "token bucket"
	// FixedWindow is the kind of ratelimit.FixedWindow.
	FixedWindow Kind = "fixed window"
)

// Rule is the policy of a limit: for all its keys, or for those on a plan. Of those that fit a request the most specific
// one decides: an override of the key, then the rule of the plan, then the rule without a plan, then the definition in
// the code.
type Rule struct {
	// Limit is the limit's name.
	Limit string
	// Plan is the plan that the rule is for. Empty: every plan that has no rule of its own, and none.
	Plan string
	// Kind is how tokens arrive. Defaults to TokenBucket.
	Kind Kind
	// Rate is the number of tokens that arrive each Period.
	Rate float64
	// Period is the time over which Rate tokens arrive.
	Period time.Duration
	// Capacity is the most a bucket holds. Defaults to nil: as much as Rate. 0 holds nothing, as ratelimit.NoCapacity.
	Capacity *float64
	// MaxReserved is how many tokens Reserve may owe. Defaults to nil: no bound. 0 is none.
	MaxReserved *float64
	// Shards is the number of rows of a bucket. Defaults to 1.
	Shards int
	// Start is the start of some window. Defaults to the zero time: it follows from the name and the key.
	Start time.Time
	// Mode is whether the rule refuses anybody. Defaults to ratelimit.On.
	Mode ratelimit.Mode
	// OnChange is what becomes of the tokens that buckets hold when the rule takes the place of the policy before.
	// Defaults to ratelimit.KeepTokens.
	OnChange ratelimit.OnChange
	// Unit is what a token is, for people: "requests", "tokens", "messages".
	Unit string
	// Description is for people.
	Description string
}
