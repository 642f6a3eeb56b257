package admin

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/words"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// The ways in which a price follows an upstream, as the form says them.
const (
	priceTold    = "told"
	priceCharged = "charged"
)

// policy returns the policy that the fields say. Each is a field of a policy in a rules file, where spans have a field for
// their unit. The period is never empty, and left out of kinds that have none.
func (f form) policy() (ratelimit.Policy, error) {
	said, err := f.fields([]string{"rate", "capacity", "max_reserved", "shards", "slices", "first_day", "most"}, []string{"period", "lease"})
	if err != nil {
		return nil, err
	}
	for _, name := range []string{"kind", "resets", "zone", "first_weekday", "first_month"} {
		if text := f.text(name); text != "" {
			said[name] = text
			if name != "zone" {
				said[name] = strings.ToLower(text)
			}
		}
	}
	if kind := f.text("kind"); kind == string(ratelimit.KindConcurrency) || kind == string(ratelimit.KindCalendarWindow) {
		delete(said, "period")
	}
	switch start, err := f.instant("start"); {
	case err != nil:
		return nil, err
	case !start.IsZero():
		said["start"] = start
	}
	if price := f.text("adaptive"); price == priceTold || price == priceCharged {
		prices, err := f.fields([]string{"floor", "growth"}, []string{"epoch"})
		if err != nil {
			return nil, err
		}
		prices["apply"] = price == priceCharged
		said["adaptive"] = prices
	}
	data, err := json.Marshal(said)
	if err != nil {
		return nil, err
	}
	return ratelimit.UnmarshalPolicy(data)
}

// fields returns the numbers and the spans that are filled in.
func (f form) fields(numbers, spans []string) (map[string]any, error) {
	said := make(map[string]any)
	for _, name := range numbers {
		switch n, err := f.amount(name); {
		case err != nil:
			return nil, err
		case n != nil:
			said[name] = *n
		}
	}
	for _, name := range spans {
		switch d, err := f.duration(name); {
		case err != nil:
			return nil, err
		case d != 0:
			said[name] = words.Span(d)
		}
	}
	return said, nil
}

// fill writes a rule into the form as the fields say it.
func (f form) fill(r rules.Rule) {
	for name, word := range map[string]string{
		"limit": r.Limit, "plan": r.Plan, "unit": r.Unit, "description": r.Description,
		"mode": string(cmp.Or(r.Mode, ratelimit.On)), "on_change": string(cmp.Or(r.OnChange, ratelimit.KeepTokens)),
	} {
		url.Values(f).Set(name, word)
	}
	f.fillFields(policyFields(r.Policy))
}

// policyFields returns the fields of a policy as a rules file has them; none for a policy that cannot be.
func policyFields(policy ratelimit.Policy) (fields map[string]any) {
	if data, err := ratelimit.MarshalPolicy(policy); err == nil {
		_ = json.Unmarshal(data, &fields) // it is an object
	}
	return fields
}

// fillFields writes the fields of a policy.
func (f form) fillFields(fields map[string]any) {
	set := url.Values(f).Set
	for name, value := range fields {
		switch v := value.(type) {
		case float64:
			set(name, decimal(v))
		case map[string]any:
			set(name, map[bool]string{false: priceTold, true: priceCharged}[v["apply"] == true])
			f.fillFields(v)
		case string:
			set(name, v)
			switch name {
			case "period", "lease", "epoch":
				d, _ := words.ParseSpan(v) // as MarshalPolicy writes it
				f.fillSpan(name, d)
			case "first_weekday", "first_month":
				set(name, strings.ToUpper(v[:1])+v[1:])
			}
		}
	}
}

// fillSpan writes a span. The epoch has no field for its unit.
func (f form) fillSpan(name string, d time.Duration) {
	n, unit := inUnits(d)
	if name == "epoch" {
		n, unit = strconv.FormatFloat(d.Seconds(), 'f', -1, 64), "second"
	}
	url.Values(f).Set(name, n)
	url.Values(f).Set(name+"_unit", unit)
}

// policyWords returns a policy for people.
func policyWords(limit ratelimit.Limit) string {
	if limit == (ratelimit.Limit{}) {
		return "not known"
	}
	return limit.Policy().String()
}

// fieldWords returns a field of a policy for people.
func fieldWords(value any) string {
	switch v := value.(type) {
	case nil:
		return "default"
	case float64:
		return number(v)
	case map[string]any:
		if v["apply"] == true {
			return "charged"
		}
		return "told, not charged"
	}
	return fmt.Sprint(value)
}
