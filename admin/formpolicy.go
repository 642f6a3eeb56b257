package admin

import (
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// policy returns the policy that the fields of a rule say. A field that means nothing for the kind is an error of the rule,
// but for the period, which is never empty.
func (f form) policy() (r rules.Rule, err error) {
	r.Kind, r.Mode = rules.Kind(f.text("kind")), ratelimit.Mode(f.text("mode"))
	if r.Kind != rules.Concurrency || f.text("rate") != "" {
		if r.Rate, err = f.positive("rate"); err != nil {
			return r, err
		}
	}
	if r.Kind != rules.Concurrency && r.Kind != rules.CalendarWindow {
		if r.Period, err = f.duration("period"); err != nil {
			return r, err
		}
	}
	if r.Capacity, err = f.amount("capacity"); err != nil {
		return r, err
	}
	if r.MaxReserved, err = f.amount("max_reserved"); err != nil {
		return r, err
	}
	if r.Start, err = f.instant("start"); err != nil {
		return r, err
	}
	if r.Lease, err = f.duration("lease"); err != nil {
		return r, err
	}
	for name, field := range map[string]*int{"shards": &r.Shards, "slices": &r.Slices, "most": &r.Most, "first_day": &r.FirstDay} {
		if *field, err = f.count(name); err != nil {
			return r, err
		}
	}
	r.Resets, r.Zone = ratelimit.Calendar(f.text("resets")), f.text("zone")
	r.FirstWeekday, r.FirstMonth = weekdayOf(f.text("first_weekday")), monthOf(f.text("first_month"))
	r.Adaptive, err = f.adaptive()
	return r, err
}

// count returns a whole number, and 0 where the field is left out.
func (f form) count(name string) (int, error) {
	text := f.text(name)
	if text == "" {
		return 0, nil
	}
	n, err := strconv.Atoi(text)
	switch {
	case err != nil && name == "shards":
		return 0, wrong("Shards is no whole number. Use a power of two up to 64, or leave it out.")
	case err != nil:
		return 0, wrong("%s is no whole number.", label(name))
	}
	return n, nil
}

// The ways in which a price follows an upstream, as the form says them.
const (
	priceTold    = "told"
	priceCharged = "charged"
)

// adaptive returns how the price follows an upstream, and nil where it does not.
func (f form) adaptive() (a *rules.Adaptive, err error) {
	said := f.text("adaptive")
	if said != priceTold && said != priceCharged {
		return nil, nil //nolint:nilnil // most do not
	}
	a = &rules.Adaptive{Apply: said == priceCharged}
	for name, field := range map[string]*float64{"floor": &a.Floor, "growth": &a.Growth} {
		if f.text(name) == "" {
			continue
		}
		if *field, err = f.positive(name); err != nil {
			return nil, err
		}
	}
	a.Epoch, err = f.duration("epoch")
	return a, err
}

// weekdayOf returns the day of a name: Sunday where there is none.
func weekdayOf(name string) time.Weekday {
	for day := time.Sunday; day <= time.Saturday; day++ {
		if strings.EqualFold(day.String(), name) {
			return day
		}
	}
	return time.Sunday
}

// monthOf returns the month of a name, and 0 where there is none.
func monthOf(name string) time.Month {
	for month := time.January; month <= time.December; month++ {
		if strings.EqualFold(month.String(), name) {
			return month
		}
	}
	return 0
}

// fill writes a rule into the form as the fields say it.
func (f form) fill(r rules.Rule) {
	set := url.Values(f).Set
	words := map[string]string{
		"limit": r.Limit, "plan": r.Plan, "kind": string(r.Kind), "mode": string(r.Mode), "on_change": string(r.OnChange),
		"unit": r.Unit, "description": r.Description, "resets": string(r.Resets), "zone": r.Zone,
	}
	for name, word := range words {
		set(name, word)
	}
	for name, tokens := range map[string]*float64{"rate": &r.Rate, "capacity": r.Capacity, "max_reserved": r.MaxReserved} {
		if tokens != nil && (name != "rate" || *tokens > 0) {
			set(name, decimal(*tokens))
		}
	}
	for name, d := range map[string]time.Duration{"period": r.Period, "lease": r.Lease} {
		if d > 0 {
			n, unit := inUnits(d)
			set(name, n)
			set(name+"_unit", unit)
		}
	}
	for name, n := range map[string]int{"slices": r.Slices, "most": r.Most, "first_day": r.FirstDay} {
		if n != 0 {
			set(name, strconv.Itoa(n))
		}
	}
	if r.Shards > 1 {
		set("shards", strconv.Itoa(r.Shards))
	}
	if !r.Start.IsZero() {
		set("start", r.Start.UTC().Format(time.RFC3339Nano))
	}
	if r.Resets == ratelimit.Weekly {
		set("first_weekday", r.FirstWeekday.String())
	}
	if r.FirstMonth != 0 {
		set("first_month", r.FirstMonth.String())
	}
	f.fillAdaptive(r.Adaptive)
}

// fillAdaptive writes how the price follows an upstream.
func (f form) fillAdaptive(a *rules.Adaptive) {
	if a == nil {
		return
	}
	set := url.Values(f).Set
	set("adaptive", map[bool]string{false: priceTold, true: priceCharged}[a.Apply])
	if a.Floor > 0 {
		set("floor", decimal(a.Floor))
	}
	if a.Growth > 0 {
		set("growth", decimal(a.Growth))
	}
	if a.Epoch > 0 {
		set("epoch", decimal(a.Epoch.Seconds()))
		set("epoch_unit", "second")
	}
}
