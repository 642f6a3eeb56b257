package rules

import (
	"errors"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	minMultiplier = 1e-6
	maxMultiplier = 1e6
)

// Override is the policy of a single key in place of the rule. It says one of Multiplier, OnPlan and Policy.
type Override struct {
	// Limit is the limit's name.
	Limit string
	// Key is the key as stored; see [ratelimit.Limiter.StoredKey]. Empty: the bucket of [ratelimit.Limit.Global].
	Key string
	// Multiplier multiplies the Rate, the Capacity and the MaxReserved that the key would have otherwise: from 1e-6 to
	// 1e6. If a product is more or less than a policy can have, it's the nearest possible value. A Concurrency's slots are
	// rounded down, to at least one. A Capacity of 1 or more stays at least 1, and so does the Rate of a sliding or
	// calendar window, which is its capacity. So 0.1 times 5 a minute is 0.5 a minute with a Capacity of 1.
	Multiplier float64
	// OnPlan puts the key on a plan. The plan of its requests does not count.
	OnPlan string
	// Policy is a policy of the key's own.
	Policy ratelimit.Policy
	// Mode says whether Policy refuses. Defaults to ratelimit.On. Without a Policy it must be empty, and the rule's Mode
	// counts.
	Mode ratelimit.Mode
	// OnChange changes the tokens in the bucket when the override begins, and again when it ends. Defaults to
	// ratelimit.CarryUsage for a window, and to ratelimit.KeepTokens for a token bucket. If a rule of the limit has
	// another kind of policy, it must be ratelimit.ResetTokens.
	OnChange ratelimit.OnChange
	// Until is the instant at which the override ends by itself. Defaults to the zero time: never.
	Until time.Time
}

// PolicyOn returns the policy of a key on a plan under the override, or nil if it isn't known. ofPlan returns a plan's
// policy without overrides, or nil.
func (o *Override) PolicyOn(plan string, ofPlan func(plan string) ratelimit.Policy) ratelimit.Policy {
	switch {
	case o.Policy != nil:
		return o.Policy
	case o.OnPlan != "":
		return ofPlan(o.OnPlan)
	}
	if base := ofPlan(plan); base != nil {
		return ratelimit.Scale(base, o.Multiplier)
	}
	return nil
}

// Validate returns an error that wraps ErrInvalid, and names the field, if Store.Override would reject the override.
func (o *Override) Validate() error {
	if err := o.check(); err != nil {
		return invalid("override of a key of %.80q: %w", o.Limit, err)
	}
	return nil
}

func (o *Override) check() error {
	if err := checkBucket(o.Limit, o.Key); err != nil {
		return err
	}
	if err := checkOnChange(o.OnChange); err != nil {
		return err
	}
	if !o.Until.IsZero() {
		if err := checkInstant("Until", o.Until); err != nil {
			return err
		}
	}
	switch said := count(o.Multiplier != 0, o.OnPlan != "", o.Policy != nil); {
	case said != 1:
		return fmt.Errorf("it has %d of Multiplier, OnPlan and Policy; give it one", said)
	case o.Multiplier != 0 && !(o.Multiplier >= minMultiplier && o.Multiplier <= maxMultiplier):
		return fmt.Errorf("its Multiplier is %v; use one from %g to %g", o.Multiplier, minMultiplier, maxMultiplier)
	case o.OnPlan != "" && !validPlan.MatchString(o.OnPlan):
		return fmt.Errorf("its OnPlan is %.80q; use up to 64 letters, digits and _ . : / -", o.OnPlan)
	case o.Policy == nil && o.Mode != "":
		return errors.New("it has a Mode and no Policy; give it a Policy, or change the Mode of the rule")
	case o.Policy == nil:
		return nil
	}
	return checkPolicy(o.Limit, o.Policy, o.Mode, o.OnChange)
}

// Bucket names one bucket.
type Bucket struct {
	// Limit is the limit's name.
	Limit string
	// Key is the key as stored; see [ratelimit.Limiter.StoredKey].
	Key string
}

func checkBucket(limit, key string) error {
	switch {
	case !validName.MatchString(limit):
		return fmt.Errorf("its Limit is %.80q; use 1 to 64 letters, digits and _ . : / -", limit)
	case !isText(key, maxKey):
		return fmt.Errorf("its Key has %d bytes; use up to %d of UTF-8 without NUL, as Limiter.StoredKey returns them",
			len(key), maxKey)
	}
	return nil
}

// checkInstant checks that an instant can be stored: the years 1 to 9999.
func checkInstant(field string, at time.Time) error {
	if at.Before(time.UnixMicro(minInstant)) || at.After(time.UnixMicro(maxInstant)) {
		return fmt.Errorf("its %s is %v; use a time from year 1 to year 9999", field, at.Round(0).UTC())
	}
	return nil
}

func count(said ...bool) (n int) {
	for _, s := range said {
		if s {
			n++
		}
	}
	return n
}
