package cli

import (
	"fmt"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/words"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// policyView is a policy for programs. What only some kinds have is left out of the others.
type policyView struct {
	Kind         rules.Kind         `json:"kind"`
	Rate         float64            `json:"rate,omitzero"`
	PeriodUs     int64              `json:"period_us,omitzero"`
	Capacity     float64            `json:"capacity"`
	MaxReserved  *float64           `json:"max_reserved"` // null: no bound, and of a calendar window as much as the rate
	Shards       int                `json:"shards"`
	Start        time.Time          `json:"start,omitzero"`
	Slices       int                `json:"slices,omitzero"`
	Resets       ratelimit.Calendar `json:"resets,omitzero"`
	Zone         string             `json:"zone,omitzero"`
	FirstWeekday string             `json:"first_weekday,omitzero"`
	FirstDay     int                `json:"first_day,omitzero"`
	FirstMonth   string             `json:"first_month,omitzero"`
	Most         int                `json:"most,omitzero"`
	LeaseUs      int64              `json:"lease_us,omitzero"`
	Adaptive     *adaptiveView      `json:"adaptive,omitempty"`
	Mode         ratelimit.Mode     `json:"mode"`
}

// adaptiveView is how a price follows an upstream, for programs.
type adaptiveView struct {
	Floor   float64 `json:"floor"`
	Growth  float64 `json:"growth"`
	EpochUs int64   `json:"epoch_us"`
	Apply   bool    `json:"apply"`
}

// stored returns an instant as the tables keep it.
func stored(at time.Time) time.Time { return at.UTC().Truncate(time.Microsecond) }

// viewOf returns what a rule says, with the defaults written out.
func viewOf(rule *rules.Rule) policyView {
	r := rule.WithDefaults()
	v := policyView{
		Kind: r.Kind, Rate: r.Rate, PeriodUs: r.Period.Microseconds(), Capacity: r.Rate, MaxReserved: r.MaxReserved, Shards: r.Shards,
		Start: stored(r.Start), Slices: r.Slices, Resets: r.Resets, Zone: r.Zone, FirstDay: r.FirstDay, Most: r.Most,
		LeaseUs: r.Lease.Microseconds(), Mode: r.Mode,
	}
	switch {
	case r.Kind == rules.Concurrency:
		v.Capacity = float64(r.Most)
	case r.Capacity != nil:
		v.Capacity = *r.Capacity
	}
	if r.Resets == ratelimit.Weekly {
		v.FirstWeekday = strings.ToLower(r.FirstWeekday.String())
	}
	if r.FirstMonth != 0 {
		v.FirstMonth = strings.ToLower(r.FirstMonth.String())
	}
	if a := r.Adaptive; a != nil {
		v.Adaptive = &adaptiveView{a.Floor, a.Growth, a.Epoch.Microseconds(), a.Apply}
	}
	return v
}

// viewOfPolicy returns the numbers of a policy of a limit.
func viewOfPolicy(limit ratelimit.Limit) policyView { return viewOf(new(rules.FromLimit(limit))) }

// words returns a policy for people: 10 per minute, capacity 50.
func (v policyView) words() string {
	parts := []string{v.rateWords()}
	if v.Capacity != v.Rate && v.Kind != rules.Concurrency {
		parts = append(parts, "capacity "+words.Number(v.Capacity))
	}
	if v.Kind == rules.FixedWindow {
		parts = append(parts, string(v.Kind))
	}
	if !v.Start.IsZero() {
		parts = append(parts, "a window starts at "+instant(v.Start))
	}
	if v.MaxReserved != nil {
		parts = append(parts, "up to "+words.Number(*v.MaxReserved)+" owed")
	}
	if v.Shards > 1 {
		parts = append(parts, fmt.Sprintf("%d shards", v.Shards))
	}
	if a := v.Adaptive; a != nil {
		text := fmt.Sprintf("adapting down to %s of it, %s back each second, every %s", words.Number(a.Floor), words.Number(a.Growth), words.Period(micros(a.EpochUs)))
		if !a.Apply {
			text += ", not charged"
		}
		parts = append(parts, text)
	}
	if v.Mode != ratelimit.On {
		parts = append(parts, "mode "+string(v.Mode))
	}
	return strings.Join(parts, ", ")
}

// rateWords returns how much there is, and when.
func (v policyView) rateWords() string {
	switch v.Kind {
	case rules.SlidingWindow:
		return fmt.Sprintf("never more than %s, counted in %d slices", words.InAny(v.Rate, micros(v.PeriodUs)), v.Slices)
	case rules.Concurrency:
		return fmt.Sprintf("%d at a time, leases of %s", v.Most, words.Span(micros(v.LeaseUs)))
	case rules.CalendarWindow:
		text := fmt.Sprintf("%s per calendar %s in %s", words.Number(v.Rate), v.Resets, v.Zone)
		switch {
		case v.FirstMonth != "":
			text += fmt.Sprintf(", from day %d of %s on", v.FirstDay, v.FirstMonth)
		case v.FirstDay != 0:
			text += fmt.Sprintf(", from day %d on", v.FirstDay)
		case v.FirstWeekday != "":
			text += ", from " + v.FirstWeekday + " on"
		}
		return text
	case rules.TokenBucket, rules.FixedWindow:
	}
	return words.Rate(v.Rate, micros(v.PeriodUs))
}

// micros returns a span of so many microseconds.
func micros(us int64) time.Duration { return time.Duration(us) * time.Microsecond }
