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
	// Key is the key as stored; see [ratelimit.Limiter.StoredKey]. Empty: that of [ratelimit.Limit.Global].
	Key string
	// Multiplier gives the key so many times the Rate, the Capacity and the MaxReserved that it would have otherwise: from
	// 1e-6 to 1e6. Where that is more or less than a policy may say, it gives as much as one may.
	Multiplier float64
	// OnPlan puts the key on a plan, whatever plan its requests name.
	OnPlan string
	// Policy is a policy of the key's own. Its Limit, Plan, Unit, Description and OnChange stay empty.
	Policy *Rule
	// OnChange is what becomes of the tokens that the bucket holds when the override begins, and again when it ends.
	// Defaults to ratelimit.KeepTokens.
	OnChange ratelimit.OnChange
	// Until is the instant at which the override ends by itself. Defaults to the zero time: never.
	Until time.Time
}

func (o *Override) validate() error {
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
	case o.Policy == nil:
		return nil
	case o.Policy.Limit != "" || o.Policy.Plan != "" || o.Policy.Unit != "" || o.Policy.Description != "" || o.Policy.OnChange != "":
		return errors.New("its Policy has a Limit, a Plan, a Unit, a Description or an OnChange; leave these to the override and its rule")
	}
	policy := *o.Policy
	policy.Limit = o.Limit
	return policy.check()
}

// Pause is a time in which a key, or all keys of a limit, are given nothing: Take and Check refuse until its end, and
// what is reserved is ready no earlier. It begins as soon as a program hears of it, unless [Edit.From] says later. Of a
// pause of the limit and one of the key, the one that ends later counts.
type Pause struct {
	// Limit is the limit's name.
	Limit string
	// Key is the key as stored; see [ratelimit.Limiter.StoredKey]. Empty: every bucket of the limit.
	Key string
	// Until is the end.
	Until time.Time
}

func (p *Pause) validate() error {
	err := checkBucket(p.Limit, p.Key)
	switch {
	case err != nil:
	case p.Until.IsZero():
		err = errors.New("it has no Until; say when it ends")
	default:
		err = checkInstant("Until", p.Until)
	}
	if err != nil {
		return invalid("pause of %.80q: %w", p.Limit, err)
	}
	return nil
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
		return fmt.Errorf("its Key has %d bytes; use up to %d of UTF-8 without NUL, as Limiter.StoredKey returns them", len(key), maxKey)
	}
	return nil
}

// checkInstant checks that an instant can be stored: the years 1 to 9999.
func checkInstant(field string, at time.Time) error {
	if at.Before(time.UnixMicro(minInstant)) || at.After(time.UnixMicro(maxInstant)) {
		return fmt.Errorf("its %s is %v; use an instant from year 1 to year 9999", field, at)
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
