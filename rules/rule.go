package rules

import (
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Rule is the policy of a limit: for all its keys, or for the keys on a plan. The most specific policy decides a
// request: an override of the key, then the rule of the plan, then the rule without a plan, then the definition in the
// code.
type Rule struct {
	// Limit is the limit's name.
	Limit string
	// Plan is the plan that the rule is for. Empty: every plan that has no rule of its own, and none.
	Plan string
	// Policy is a policy of package ratelimit. Give it the Shards of the definition in the code, because another number of
	// rows resets the bucket.
	Policy ratelimit.Policy
	// Mode is whether the rule refuses requests. Defaults to ratelimit.On.
	Mode ratelimit.Mode
	// OnChange changes the tokens in the buckets when the rule replaces the policy before. Defaults to
	// ratelimit.CarryUsage for a window, and to ratelimit.KeepTokens for a token bucket. If the policy before is of
	// another kind, it must be ratelimit.ResetTokens.
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

// validate returns an error that wraps ErrInvalid and says what to change.
func (r *Rule) validate() error {
	err := checkPolicy(r.Limit, r.Policy, r.Mode, r.OnChange)
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

// AsLimit returns the limit with the rule's policy, as you'd define it in the code. Errors wrap ErrInvalid and say what
// to change.
func (r Rule) AsLimit() (ratelimit.Limit, error) {
	if err := r.validate(); err != nil {
		return ratelimit.Limit{}, err
	}
	return ratelimit.NewLimit(r.Limit, r.Policy)
}

// checkPolicy checks the policy of a rule or an override, and the words beside it.
func checkPolicy(limit string, policy ratelimit.Policy, mode ratelimit.Mode, change ratelimit.OnChange) error {
	switch mode {
	case "", ratelimit.On, ratelimit.Shadow, ratelimit.Off:
	default:
		return fmt.Errorf("its Mode is %.20q; use on, shadow or off", string(mode))
	}
	if err := checkOnChange(change); err != nil {
		return err
	}
	if _, err := ratelimit.NewLimit(limit, policy); err != nil {
		return err
	}
	if _, err := ratelimit.MarshalPolicy(policy); err != nil {
		return err
	}
	return nil
}

func checkOnChange(c ratelimit.OnChange) error {
	switch c {
	case "", ratelimit.CarryUsage, ratelimit.KeepTokens, ratelimit.ScaleTokens, ratelimit.AddTokens, ratelimit.ResetTokens:
		return nil
	}
	return fmt.Errorf("its OnChange is %.20q; use carry, keep, scale, add or reset", string(c))
}

// isText reports whether Postgres can store s, and the tables have room for it.
func isText(s string, most int) bool {
	return len(s) <= most && utf8.ValidString(s) && strings.IndexByte(s, 0) < 0
}
