package rules

import (
	"cmp"
	"encoding/json"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The years 1 to 9999, in microseconds since 1970, as in the tables.
const (
	minInstant = int64(-62135596800000000)
	maxInstant = int64(253402300799999999)
)

// policyRow is a policy in the columns of a table and in the history, where the names are those of the columns. Of a
// concurrency, Rate is Most and PeriodUs the Lease; of a calendar window, PeriodUs is how long one is at most.
type policyRow struct {
	Kind        string   `json:"kind"`
	Rate        float64  `json:"rate"`
	PeriodUs    int64    `json:"period_us"`
	Capacity    *float64 `json:"capacity,omitempty"`
	MaxReserved *float64 `json:"max_reserved,omitempty"`
	Shards      int      `json:"shards"`
	StartUs     *int64   `json:"start_us,omitempty"`
	Mode        string   `json:"mode"`

	Slices       *int     `json:"slices,omitempty"`
	Resets       *string  `json:"resets,omitempty"`
	Zone         *string  `json:"zone,omitempty"`
	FirstWeekday *int     `json:"first_weekday,omitempty"`
	FirstDay     *int     `json:"first_day,omitempty"`
	FirstMonth   *int     `json:"first_month,omitempty"`
	Floor        *float64 `json:"floor,omitempty"`
	Growth       *float64 `json:"growth,omitempty"`
	EpochUs      *int64   `json:"epoch_us,omitempty"`
	Apply        *bool    `json:"apply,omitempty"`
}

// ruleRow is what a row of rules says of its limit and plan.
type ruleRow struct {
	policyRow
	OnChange    string `json:"on_change"`
	Unit        string `json:"unit,omitempty"`
	Description string `json:"description,omitempty"`
}

// overrideRow is what a row of overrides says of its key.
type overrideRow struct {
	Multiplier *float64   `json:"multiplier,omitempty"`
	Plan       *string    `json:"plan,omitempty"`
	Policy     *policyRow `json:"policy,omitempty"`
	OnChange   string     `json:"on_change"`
	UntilUs    *int64     `json:"until_us,omitempty"`
}

// pauseRow is what a row of pauses says of its key.
type pauseRow struct {
	UntilUs int64 `json:"until_us"`
}

// tierRow is a row of tiers.
type tierRow struct {
	Name        string            `json:"name"`
	Key         string            `json:"key"`
	Route       string            `json:"route,omitempty"`
	Conditions  map[string]string `json:"conditions,omitempty"`
	CostSource  string            `json:"cost_source"`
	FixedCost   float64           `json:"fixed_cost"`
	DefaultCost float64           `json:"default_cost"`
}

// tiersRow is the whole list of tiers in the history.
type tiersRow struct {
	Match string    `json:"match"`
	Tiers []tierRow `json:"tiers"`
}

func policyRowOf(policy ratelimit.Policy, mode ratelimit.Mode) policyRow {
	r := flatOf(policy)
	row := policyRow{
		Kind: string(r.Kind), Rate: r.Rate, PeriodUs: r.Period.Microseconds(),
		Capacity: r.Capacity, MaxReserved: r.MaxReserved, Shards: r.Shards, Mode: string(cmp.Or(mode, ratelimit.On)),
	}
	if start := time.UnixMicro(r.Start.UnixMicro()); !start.IsZero() {
		row.StartUs = new(start.UnixMicro())
	}
	switch r.Kind {
	case ratelimit.KindSlidingWindow:
		row.Slices = &r.Slices
	case ratelimit.KindCalendarWindow:
		row.PeriodUs = longest(r.Resets)
		row.Resets, row.Zone = new(string(r.Resets)), &r.Zone
		if r.Resets == ratelimit.Weekly {
			row.FirstWeekday = new(int(r.FirstWeekday))
		}
		if hasDay(r.Resets) {
			row.FirstDay = &r.FirstDay
		}
		if hasMonth(r.Resets) {
			row.FirstMonth = new(int(r.FirstMonth))
		}
	case ratelimit.KindConcurrency:
		row.Rate, row.PeriodUs = float64(r.Most), r.Lease.Microseconds()
	case ratelimit.KindTokenBucket, ratelimit.KindFixedWindow:
	}
	if a := r.Adaptive; a != nil {
		row.Floor, row.Growth, row.EpochUs, row.Apply = &a.Floor, &a.Growth, new(a.Epoch.Microseconds()), &a.Apply
	}
	return row
}

func ruleRowOf(r Rule) ruleRow {
	return ruleRow{policyRowOf(r.Policy, r.Mode), string(cmp.Or(r.OnChange, ratelimit.KeepTokens)), r.Unit, r.Description}
}

func overrideRowOf(o Override) overrideRow {
	row := overrideRow{OnChange: string(o.OnChange), UntilUs: microsOf(o.Until)}
	if o.OnChange == "" {
		row.OnChange = string(ratelimit.KeepTokens)
	}
	switch {
	case o.Policy != nil:
		row.Policy = new(policyRowOf(o.Policy, o.Mode))
	case o.OnPlan != "":
		row.Plan = &o.OnPlan
	default:
		row.Multiplier = &o.Multiplier
	}
	return row
}

func tierRowOf(t Tier) tierRow {
	row := tierRow{
		Name: t.Limit, Key: t.Key, Route: t.Route, Conditions: t.When,
		CostSource: t.CostSource, FixedCost: t.FixedCost, DefaultCost: t.DefaultCost,
	}
	if row.CostSource == "" {
		row.CostSource = "fixed"
	}
	if row.Conditions == nil {
		row.Conditions = map[string]string{}
	}
	return row
}

// policy returns the policy; nil for a kind that there is not.
func (p *policyRow) policy() ratelimit.Policy {
	r := flat{
		Kind: ratelimit.Kind(p.Kind), Rate: p.Rate, Period: microseconds(p.PeriodUs), Capacity: p.Capacity, MaxReserved: p.MaxReserved, Shards: p.Shards,
		Slices: or(p.Slices), Resets: ratelimit.Calendar(or(p.Resets)), Zone: or(p.Zone), FirstWeekday: time.Weekday(or(p.FirstWeekday)),
		FirstDay: or(p.FirstDay), FirstMonth: time.Month(or(p.FirstMonth)), Most: int(p.Rate), Lease: microseconds(p.PeriodUs),
	}
	if p.StartUs != nil {
		r.Start = time.UnixMicro(*p.StartUs).UTC()
	}
	if p.Apply != nil {
		r.Adaptive = &ratelimit.Adaptive{Floor: or(p.Floor), Growth: or(p.Growth), Epoch: microseconds(or(p.EpochUs)), Apply: *p.Apply}
	}
	return r.policy()
}

func (w *ruleRow) rule(limit, plan string) Rule {
	return Rule{limit, plan, w.policy(), ratelimit.Mode(w.Mode), ratelimit.OnChange(w.OnChange), w.Unit, w.Description}
}

func (w *overrideRow) override(limit, key string) Override {
	o := Override{Limit: limit, Key: key, OnChange: ratelimit.OnChange(w.OnChange), Until: timeOf(w.UntilUs)}
	if w.Multiplier != nil {
		o.Multiplier = *w.Multiplier
	}
	if w.Plan != nil {
		o.OnPlan = *w.Plan
	}
	if w.Policy != nil {
		o.Policy, o.Mode = w.Policy.policy(), ratelimit.Mode(w.Policy.Mode)
	}
	return o
}

func (w *tierRow) tier() Tier {
	t := Tier{
		Limit: w.Name, Key: w.Key, Route: w.Route, When: w.Conditions,
		CostSource: w.CostSource, FixedCost: w.FixedCost, DefaultCost: w.DefaultCost,
	}
	if len(t.When) == 0 {
		t.When = nil
	}
	return t
}

// microseconds returns a span that is as long as a time.Duration can be where it would be longer.
func microseconds(n int64) time.Duration {
	const most = int64(1<<63-1) / int64(time.Microsecond)
	return time.Duration(min(max(n, -most), most)) * time.Microsecond
}

// microsOf returns nil for the zero time.
func microsOf(at time.Time) *int64 {
	if at.IsZero() {
		return nil
	}
	return new(at.UnixMicro())
}

// timeOf returns the zero time for nil.
func timeOf(us *int64) time.Time {
	if us == nil {
		return time.Time{}
	}
	return time.UnixMicro(*us).UTC()
}

// asJSON returns v as it stands in a table; nil for nil. It is text, as bytes are a bytea where a query is run without asking
// the server for the types of its parameters (exec and simple_protocol).
func asJSON(v any) (*string, error) {
	if v == nil {
		return nil, nil //nolint:nilnil // null in the table
	}
	text, err := json.Marshal(v)
	return new(string(text)), err
}

// longest returns how long a window of the calendar is at most, in microseconds, as the tables check it.
func longest(c ratelimit.Calendar) int64 {
	days := map[ratelimit.Calendar]int64{ratelimit.Daily: 1, ratelimit.Weekly: 7, ratelimit.Monthly: 31, ratelimit.Quarterly: 92, ratelimit.Yearly: 366}
	return days[c] * ratelimit.Day.Microseconds()
}
