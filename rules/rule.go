package rules

import (
	"cmp"
	"fmt"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

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
	// MaxReserved is how many tokens Reserve may owe. Defaults to nil: no bound. 0 is none, as ratelimit.NoDebt.
	MaxReserved *float64
	// Shards is the number of rows of a bucket. Defaults to 1.
	Shards int
	// Start is the start of some window, to the microsecond. Defaults to the zero time: it follows from the name and the
	// key. A TokenBucket has none.
	Start time.Time
	// Mode is whether the rule refuses anybody. Defaults to ratelimit.On.
	Mode ratelimit.Mode
	// OnChange is what becomes of the tokens that buckets hold when the rule takes the place of the policy before.
	// Defaults to ratelimit.KeepTokens.
	OnChange ratelimit.OnChange
	// Unit is what a token is, for people: "requests", "tokens", "messages". 64 bytes at most.
	Unit string
	// Description is for people. 2000 bytes at most.
	Description string
}

const (
	maxUnit   = 64
	maxText   = 2000
	maxAuthor = 256
	maxKey    = 256
)

var (
	validName = regexp.MustCompile(`^[A-Za-z0-9_.:/-]{1,64}$`)
	validPlan = regexp.MustCompile(`^[A-Za-z0-9_.:/-]{0,64}$`)
)

// withDefaults returns the rule with every default written out but those that are nil.
func (r Rule) withDefaults() Rule {
	r.Kind = cmp.Or(r.Kind, TokenBucket)
	r.Shards = cmp.Or(r.Shards, 1)
	r.Mode = cmp.Or(r.Mode, ratelimit.On)
	r.OnChange = cmp.Or(r.OnChange, ratelimit.KeepTokens)
	return r
}

// validate returns an error that wraps ErrInvalid and says what to change.
func (r *Rule) validate() error {
	err := r.check()
	switch {
	case err != nil:
	case !validPlan.MatchString(r.Plan):
		err = fmt.Errorf("its Plan is %.80q; use up to 64 letters, digits and _ . : / -", r.Plan)
	case !isText(r.Unit, maxUnit):
		err = fmt.Errorf("its Unit has %d bytes; use up to %d of UTF-8 without NUL", len(r.Unit), maxUnit)
	case !isText(r.Description, maxText):
		err = fmt.Errorf("its Description has %d bytes; use up to %d of UTF-8 without NUL", len(r.Description), maxText)
	}
	if err != nil {
		return invalid("rule %.80q, plan %.80q: %w", r.Limit, r.Plan, err)
	}
	return nil
}

// AsLimit returns the limit with the policy of the rule, as it would be defined in the code. It returns an error that wraps
// ErrInvalid and says what to change.
func (r Rule) AsLimit() (ratelimit.Limit, error) {
	if err := r.validate(); err != nil {
		return ratelimit.Limit{}, err
	}
	policy, err := r.policy()
	if err != nil {
		return ratelimit.Limit{}, err
	}
	return ratelimit.NewLimit(r.Limit, policy)
}

// check checks the words and numbers of the policy.
func (r *Rule) check() error {
	switch r.Mode {
	case "", ratelimit.On, ratelimit.Shadow, ratelimit.Off:
	default:
		return fmt.Errorf("its Mode is %.20q; use on, shadow or off", string(r.Mode))
	}
	if err := checkOnChange(r.OnChange); err != nil {
		return err
	}
	policy, err := r.policy()
	if err != nil {
		return err
	}
	_, err = ratelimit.NewLimit(r.Limit, policy)
	return err
}

// policy returns the numbers of the rule as the core has them.
func (r *Rule) policy() (ratelimit.Policy, error) {
	capacity, err := amount("Capacity", r.Capacity, ratelimit.NoCapacity)
	if err != nil {
		return nil, err
	}
	maxReserved, err := amount("MaxReserved", r.MaxReserved, ratelimit.NoDebt)
	if err != nil {
		return nil, err
	}
	switch r.Kind {
	case "", TokenBucket:
		if !r.Start.IsZero() {
			return nil, fmt.Errorf("it has a Start, which a token bucket has no use for; leave it out, or use the kind %q", FixedWindow)
		}
		return ratelimit.TokenBucket{
			Rate: r.Rate, Period: r.Period, Capacity: capacity, MaxReserved: maxReserved, Shards: r.Shards,
		}, nil
	case FixedWindow:
		return ratelimit.FixedWindow{
			Rate: r.Rate, Period: r.Period, Capacity: capacity, MaxReserved: maxReserved, Shards: r.Shards, Start: r.Start,
		}, nil
	}
	return nil, fmt.Errorf("its Kind is %.40q; use %q or %q", string(r.Kind), TokenBucket, FixedWindow)
}

// amount returns a number of tokens as the core has it, where 0 is the default and none has a number of its own.
func amount(field string, tokens *float64, none float64) (float64, error) {
	switch {
	case tokens == nil:
		return 0, nil
	case *tokens == 0:
		return none, nil
	case *tokens < 0:
		return 0, fmt.Errorf("its %s is %v; use 0 for none, or leave it out for the default", field, *tokens)
	}
	return *tokens, nil
}

func checkOnChange(c ratelimit.OnChange) error {
	switch c {
	case "", ratelimit.KeepTokens, ratelimit.ScaleTokens, ratelimit.AddTokens, ratelimit.ResetTokens:
		return nil
	}
	return fmt.Errorf("its OnChange is %.20q; use keep, scale, add or reset", string(c))
}

// isText reports whether Postgres can store s, and the tables have room for it.
func isText(s string, most int) bool {
	return len(s) <= most && utf8.ValidString(s) && strings.IndexByte(s, 0) < 0
}
