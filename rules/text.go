package rules

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/strictjson"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The fields of rules, overrides and tiers as files, the table and the command line write them. The fields of a policy
// stand beside the fields of its rule.
type (
	ruleName struct {
		Limit string `json:"limit,omitempty"`
		Plan  string `json:"plan,omitempty"`
	}
	ruleText struct {
		Mode        ratelimit.Mode     `json:"mode,omitempty"`
		OnChange    ratelimit.OnChange `json:"on_change,omitempty"`
		Unit        string             `json:"unit,omitempty"`
		Description string             `json:"description,omitempty"`
	}
	overrideText struct {
		Limit      string              `json:"limit,omitempty"`
		Key        *string             `json:"key,omitempty"`
		Multiplier strictjson.Positive `json:"multiplier,omitempty"`
		OnPlan     string              `json:"on_plan,omitempty"`
		Policy     json.RawMessage     `json:"policy,omitempty"`
		Mode       ratelimit.Mode      `json:"mode,omitempty"`
		OnChange   ratelimit.OnChange  `json:"on_change,omitempty"`
		Until      instant             `json:"until,omitzero"`
	}
	tierText struct {
		Limit       string              `json:"limit"`
		Key         string              `json:"key,omitempty"`
		Route       string              `json:"route,omitempty"`
		When        conditions          `json:"when,omitempty"`
		CostSource  string              `json:"cost_source,omitempty"`
		FixedCost   strictjson.Positive `json:"fixed_cost,omitempty"`
		DefaultCost strictjson.Positive `json:"default_cost,omitempty"`
	}
)

// MarshalJSON returns the rule as an object with the fields of a rules file.
func (r Rule) MarshalJSON() ([]byte, error) {
	name, err := json.Marshal(ruleName{r.Limit, r.Plan})
	if err != nil {
		return nil, err
	}
	policy, err := ratelimit.MarshalPolicy(r.Policy)
	if err != nil {
		return nil, err
	}
	rest, err := json.Marshal(ruleText{unless(r.Mode, ratelimit.On), r.OnChange, r.Unit, r.Description})
	if err != nil {
		return nil, err
	}
	return joined(name, policy, rest), nil
}

// unless returns the zero value for the default, which is not written.
func unless[T comparable](value, normal T) (zero T) {
	if value == normal {
		return zero
	}
	return value
}

// joined returns one object with the fields of all.
func joined(objects ...[]byte) []byte {
	out := []byte("{")
	for _, o := range objects {
		inside := o[1 : len(o)-1]
		if len(inside) > 0 && len(out) > 1 {
			out = append(out, ',')
		}
		out = append(out, inside...)
	}
	return append(out, '}')
}

// UnmarshalJSON reads the fields of a rules file. It returns an error for a field that does not exist.
func (r *Rule) UnmarshalJSON(data []byte) error {
	said, err := strictjson.Parse(data)
	if err != nil {
		return err
	}
	var name ruleName
	var text ruleText
	var names []string
	for _, into := range []any{&name, &text} {
		of, err := said.Take(into)
		if err != nil {
			return err
		}
		names = append(names, of...)
	}
	policy, err := policyOf(said)
	if wrong, ok := errors.AsType[*strictjson.Error](err); ok && wrong.Unknown {
		err = fmt.Errorf("%w; a rule also has %s", err, strings.Join(names, ", "))
	}
	if err != nil {
		return fmt.Errorf("rule %.80q: %w", name.Limit, err)
	}
	*r = Rule{name.Limit, name.Plan, policy, text.Mode, text.OnChange, text.Unit, text.Description}
	return nil
}

// policyOf returns the policy that the fields say.
func policyOf(said strictjson.Object) (ratelimit.Policy, error) {
	data, err := json.Marshal(said)
	if err != nil {
		return nil, err
	}
	return ratelimit.UnmarshalPolicy(data)
}

// MarshalJSON returns the override as an object with the fields of a rules file.
func (o Override) MarshalJSON() ([]byte, error) {
	text, err := o.text()
	if err != nil {
		return nil, err
	}
	text.Limit, text.Key, text.Until = o.Limit, &o.Key, instant{o.Until}
	return json.Marshal(text)
}

// text returns the fields of the override but its names and its end.
func (o *Override) text() (text overrideText, err error) {
	text = overrideText{
		Multiplier: strictjson.Positive(o.Multiplier), OnPlan: o.OnPlan, Mode: unless(o.Mode, ratelimit.On), OnChange: o.OnChange,
	}
	if o.Policy != nil {
		text.Policy, err = ratelimit.MarshalPolicy(o.Policy)
	}
	return text, err
}

// UnmarshalJSON reads the fields of a rules file. It returns an error for a field that does not exist.
func (o *Override) UnmarshalJSON(data []byte) error {
	var text overrideText
	if err := decode(data, &text, "an override"); err != nil {
		return err
	}
	*o = Override{
		Limit: text.Limit, Multiplier: float64(text.Multiplier), OnPlan: text.OnPlan, Mode: text.Mode,
		OnChange: text.OnChange, Until: text.Until.Time,
	}
	if text.Key != nil {
		o.Key = *text.Key
	}
	if text.Policy == nil {
		return nil
	}
	said, err := strictjson.Parse(text.Policy)
	if err == nil {
		o.Policy, err = policyOf(said)
	}
	if err != nil {
		return fmt.Errorf("override of a key of %.80q: %w", o.Limit, err)
	}
	return nil
}

// MarshalJSON returns the tier as an object with the fields of a rules file.
func (t Tier) MarshalJSON() ([]byte, error) {
	return json.Marshal(tierText{
		t.Limit, t.Key, t.Route, t.When, unless(t.CostSource, "fixed"), unless(strictjson.Positive(t.FixedCost), 1),
		unless(strictjson.Positive(t.DefaultCost), 1),
	})
}

// UnmarshalJSON reads the fields of a rules file. It returns an error for a field that does not exist.
func (t *Tier) UnmarshalJSON(data []byte) error {
	var text tierText
	err := decode(data, &text, "a tier")
	*t = Tier{
		text.Limit, text.Key, text.Route, text.When, text.CostSource, float64(text.FixedCost),
		float64(text.DefaultCost),
	}
	return err
}

// decode decodes an object into a struct that has all of its fields.
func decode(data []byte, into any, what string) error {
	said, err := strictjson.Parse(data)
	if err != nil {
		return err
	}
	return said.Decode(into, what)
}

// instant is a time.Time as text.
type instant struct{ time.Time }

func (t instant) MarshalJSON() ([]byte, error) { return t.UTC().MarshalJSON() }

func (t *instant) UnmarshalJSON(data []byte) error {
	if t.Time.UnmarshalJSON(data) != nil {
		return errors.New("write a time such as 2026-01-31T15:04:05Z")
	}
	t.Time = t.UTC()
	return nil
}

// conditions are the When of a tier as text. A value may be a number or a word such as true.
type conditions map[string]string

func (c *conditions) UnmarshalJSON(data []byte) error {
	said, err := strictjson.Parse(data)
	if err != nil || len(said) == 0 {
		return err
	}
	*c = conditions{}
	for name, value := range said {
		text := string(value)
		switch text[0] {
		case '"':
			err = json.Unmarshal(value, &text)
		case '[', '{':
			err = strictjson.Errorf(name, "is %.40s; write a text", value)
		}
		if err != nil {
			return err
		}
		(*c)[name] = text
	}
	return nil
}
