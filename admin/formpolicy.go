package admin

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// field is a field of a policy: its name in a rules file and in the form, and a hint. A field with Options has no other
// values, and IsNumber is whether it is a number.
type field struct {
	Name, Hint string
	Options    []string
	IsNumber   bool
}

// Label returns the name for people.
func (f field) Label() string { return label(f.Name) }

// kinds returns the kinds of policies.
func kinds() []string {
	return []string{
		string(ratelimit.KindTokenBucket), string(ratelimit.KindFixedWindow), string(ratelimit.KindSlidingWindow),
		string(ratelimit.KindCalendarWindow), string(ratelimit.KindConcurrency),
	}
}

// months has no month first, because the field may be left out.
const months = ",january,february,march,april,may,june,july,august,september,october,november,december"

func fieldsOf(kind string) []field {
	rate, period := field{Name: "rate", IsNumber: true}, field{Name: "period", Hint: "90s, 1h, 7d"}
	capacity := field{Name: "capacity", Hint: "as the rate", IsNumber: true}
	reserved := field{Name: "max_reserved", Hint: "no bound", IsNumber: true}
	shards := field{Name: "shards", Hint: "1", IsNumber: true}
	switch ratelimit.Kind(kind) {
	case ratelimit.KindFixedWindow:
		return []field{rate, period, capacity, reserved, shards, {Name: "start", Hint: "2026-01-01T00:00:00Z"}}
	case ratelimit.KindSlidingWindow:
		return []field{rate, period, {Name: "slices", Hint: "60", IsNumber: true}}
	case ratelimit.KindCalendarWindow:
		return []field{
			rate,
			{Name: "resets", Options: []string{"", "day", "week", "month", "quarter", "year"}},
			{Name: "zone", Hint: "UTC"},
			{Name: "first_weekday", Options: strings.Split(",sunday,monday,tuesday,wednesday,thursday,friday,saturday", ",")},
			{Name: "first_day", Hint: "1", IsNumber: true},
			{Name: "first_month", Options: strings.Split(months, ",")},
			reserved,
		}
	case ratelimit.KindConcurrency:
		return []field{{Name: "slots", IsNumber: true}, {Name: "lease", Hint: "30s, 1m"}}
	case ratelimit.KindTokenBucket:
	}
	return []field{rate, period, capacity, reserved, shards}
}

// kind returns the kind that the form says, by default a token bucket.
func (f form) kind() string { return cmp.Or(f.text("kind"), string(ratelimit.KindTokenBucket)) }

// policy returns the policy that the form says, by the fields of its kind.
func (f form) policy() (ratelimit.Policy, error) {
	kind := f.kind()
	if !slices.Contains(kinds(), kind) {
		return nil, wrong("The kind is %.40q. Use one of %s.", kind, strings.Join(kinds(), ", "))
	}
	said := []string{fmt.Sprintf("kind: %q", kind)}
	for _, field := range fieldsOf(kind) {
		value := fmt.Sprintf("%q", f.text(field.Name))
		if field.IsNumber {
			n, err := f.amount(field.Name)
			if err != nil {
				return nil, err
			}
			if n != nil {
				value = decimal(*n)
			}
		}
		if f.text(field.Name) != "" {
			said = append(said, field.Name+": "+value)
		}
	}
	policy, err := rules.ParsePolicy(strings.Join(said, ", "))
	if err != nil {
		return nil, wrong("%s", strings.TrimPrefix(err.Error(), rules.ErrInvalid.Error()+": "))
	}
	return policy, nil
}

// fill writes a rule into the form.
func (f form) fill(r rules.Rule) {
	set := url.Values(f).Set
	for name, word := range map[string]string{
		"limit": r.Limit, "plan": r.Plan, "unit": r.Unit, "description": r.Description,
		"mode": string(cmp.Or(r.Mode, ratelimit.On)), "on_change": string(r.OnChange),
	} {
		set(name, word)
	}
	f.fillPolicy(r.Policy)
}

// fillPolicy writes a policy into the form.
func (f form) fillPolicy(policy ratelimit.Policy) {
	text, _ := ratelimit.MarshalPolicy(policy) // none of a policy that cannot be
	var fields map[string]json.RawMessage
	_ = json.Unmarshal(text, &fields)
	for name, value := range fields {
		url.Values(f).Set(name, strings.Trim(string(value), `"`))
	}
}
