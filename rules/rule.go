package rules

import (
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
	// SlidingWindow is the kind of ratelimit.SlidingWindow.
	SlidingWindow Kind = "sliding window"
	// CalendarWindow is the kind of ratelimit.CalendarWindow.
	CalendarWindow Kind = "calendar window"
	// Concurrency is the kind of ratelimit.Concurrency.
	Concurrency Kind = "concurrency"
)

// Rule is the policy of a limit: for all its keys, or for those on a plan. Of those that fit a request the most specific
// one decides: an override of the key, then the rule of the plan, then the rule without a plan, then the definition in
// the code.
type Rule struct {
	// Limit is the limit's name.
	Limit string
	// Plan is the plan that the rule is for. Empty: every plan that has no rule of its own, and none.
	Plan string
	// Kind is how tokens arrive. Defaults to TokenBucket. A field that means nothing for the kind is an error.
	Kind Kind
	// Rate is the number of tokens that arrive each Period, or that a window gives. A Concurrency has none.
	Rate float64
	// Period is the time over which Rate tokens arrive. A CalendarWindow and a Concurrency have none.
	Period time.Duration
	// Capacity is the most a bucket holds. Defaults to nil: as much as Rate. 0 holds nothing, as ratelimit.NoCapacity. It
	// is for a TokenBucket and a FixedWindow.
	Capacity *float64
	// MaxReserved is how many tokens Reserve may owe. Defaults to nil: no bound, and of a CalendarWindow as much as Rate.
	// 0 is none, as ratelimit.NoDebt. A SlidingWindow and a Concurrency have no reservations.
	MaxReserved *float64
	// Shards is the number of rows of a bucket, of a TokenBucket or a FixedWindow. Defaults to 1. Give it the number that
	// the code has: a change of the number of rows is a reset, whatever OnChange says.
	Shards int
	// Start is the start of some FixedWindow, to the microsecond. Defaults to the zero time: it follows from the name and
	// the key.
	Start time.Time
	// Slices is how many parts a SlidingWindow counts its Period in. Defaults to 60.
	Slices int
	// Resets, Zone, FirstWeekday, FirstDay and FirstMonth say when a CalendarWindow begins, as those of
	// ratelimit.CalendarWindow do. FirstWeekday is for weeks, FirstDay for months, quarters and years, and FirstMonth for
	// quarters and years.
	Resets       ratelimit.Calendar
	Zone         string
	FirstWeekday time.Weekday
	FirstDay     int
	FirstMonth   time.Month
	// Most is how many slots a Concurrency has, and Lease how long one is held without Renew. Lease defaults to a minute.
	Most  int
	Lease time.Duration
	// Adaptive has the price of a request follow what an upstream accepts; see ratelimit.Adaptive. It is for a TokenBucket,
	// a FixedWindow and a CalendarWindow, which is the contract then. Defaults to nil: a token costs one.
	Adaptive *Adaptive
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
