package ratelimit

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/internal/fields"
	"github.com/pgratelimit/pgratelimit/internal/words"
)

// MarshalPolicy returns a policy as a JSON object, as rules files, the table of rules and the command line write it:
//
//	{"kind":"token bucket","rate":10,"period":"1m","capacity":50}
//
// Fields with their default are left out. A capacity and a max_reserved of 0 are [None]. Errors wrap
// ErrInvalidLimit: NewLimit rejects the policy, or it is not of this package.
func MarshalPolicy(policy Policy) ([]byte, error) {
	if arg.IsNil(policy) {
		return nil, fmt.Errorf("%w: there is no policy", ErrInvalidLimit)
	}
	policy = valueOf(policy)
	if _, err := policy.compile(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidLimit, err)
	}
	var prices *adaptiveText
	if a, adapts := policy.(Adaptive); adapts {
		prices = &adaptiveText{fields.Positive(without(a.Floor, defaultFloor)), fields.Positive(without(a.Growth, defaultGrowth)), span(without(a.Epoch, defaultEpoch)), a.Apply}
		policy = a.Contract
	}
	text := textOf(policy)
	if text == nil {
		return nil, fmt.Errorf("%w: a %T has no text; use a policy of this package", ErrInvalidLimit, policy)
	}
	data, err := json.Marshal(text)
	if err != nil || prices == nil {
		return data, err
	}
	more, err := json.Marshal(prices)
	return slices.Concat(data[:len(data)-1], []byte(`,"adaptive":`), more, []byte("}")), err
}

// UnmarshalPolicy parses a JSON object that MarshalPolicy wrote, or a person. The kind defaults to "token bucket". It returns
// an error for a field that the kind does not have and for a field that occurs twice. Errors wrap ErrInvalidLimit, and say
// what to write instead.
func UnmarshalPolicy(data []byte) (Policy, error) {
	policy, err := unmarshalPolicy(data)
	if err == nil {
		_, err = policy.compile()
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidLimit, err)
	}
	return policy, nil
}

func unmarshalPolicy(data []byte) (Policy, error) {
	said, err := fields.Parse(data)
	if err != nil {
		return nil, err
	}
	named := struct {
		Kind Kind `json:"kind"`
	}{KindTokenBucket}
	if _, err := said.Take(&named); err != nil {
		return nil, err
	}
	text := newText(named.Kind)
	if text == nil {
		return nil, fields.Errorf("kind", "is %.40q; use one of %s, %s, %s, %s, %s", string(named.Kind),
			KindTokenBucket, KindFixedWindow, KindSlidingWindow, KindCalendarWindow, KindConcurrency)
	}
	prices, adapts := said["adaptive"]
	if named.Kind != KindSlidingWindow && named.Kind != KindConcurrency {
		delete(said, "adaptive") // of the others it is a field that they do not have
	}
	if err := said.Decode(text, "a "+string(named.Kind)); err != nil {
		return nil, err
	}
	policy, err := text.policy()
	if err != nil || !adapts {
		return policy, err
	}
	var a adaptiveText
	if said, err = fields.Parse(prices); err == nil {
		err = said.Decode(&a, "adaptive")
	}
	if err != nil {
		return nil, err
	}
	return Adaptive{Contract: policy, Floor: float64(a.Floor), Growth: float64(a.Growth), Epoch: time.Duration(a.Epoch), Apply: a.Apply}, nil
}

// Kind is the name of a kind of policy.
type Kind string

// The kinds of policy. An [Adaptive] has the kind of its contract.
const (
	KindTokenBucket    Kind = "token bucket"
	KindFixedWindow    Kind = "fixed window"
	KindSlidingWindow  Kind = "sliding window"
	KindCalendarWindow Kind = "calendar window"
	KindConcurrency    Kind = "concurrency"
)

// policyText has the fields of one kind of policy as they are written.
type policyText interface{ policy() (Policy, error) }

type (
	bucketText struct {
		Kind        Kind     `json:"kind"`
		Rate        float64  `json:"rate"`
		Period      span     `json:"period"`
		Capacity    *amount  `json:"capacity,omitempty"`
		MaxReserved *maxOwed `json:"max_reserved,omitempty"`
		Shards      int      `json:"shards,omitempty"`
		Prefetch    span     `json:"prefetch,omitempty"`
	}
	fixedText struct {
		bucketText
		Start instantText `json:"start,omitzero"`
	}
	slidingText struct {
		Kind   Kind    `json:"kind"`
		Rate   float64 `json:"rate"`
		Period span    `json:"period"`
		Slices int     `json:"slices,omitempty"`
	}
	calendarText struct {
		Kind         Kind     `json:"kind"`
		Rate         float64  `json:"rate"`
		Resets       Calendar `json:"resets"`
		Zone         string   `json:"zone,omitempty"`
		FirstWeekday weekday  `json:"first_weekday,omitzero"`
		FirstDay     int      `json:"first_day,omitempty"`
		FirstMonth   month    `json:"first_month,omitzero"`
		MaxReserved  *maxOwed `json:"max_reserved,omitempty"`
	}
	slotsText struct {
		Kind  Kind `json:"kind"`
		Most  int  `json:"most"`
		Lease span `json:"lease,omitempty"`
	}
	adaptiveText struct {
		Floor  fields.Positive `json:"floor,omitempty"`
		Growth fields.Positive `json:"growth,omitempty"`
		Epoch  span            `json:"epoch,omitempty"`
		Apply  bool            `json:"apply"`
	}
)

// newText returns the empty fields of a kind; nil if there is no such kind.
func newText(kind Kind) policyText {
	switch kind {
	case KindTokenBucket:
		return &bucketText{}
	case KindFixedWindow:
		return &fixedText{}
	case KindSlidingWindow:
		return &slidingText{}
	case KindCalendarWindow:
		return &calendarText{}
	case KindConcurrency:
		return &slotsText{}
	}
	return nil
}

// textOf returns the text of a policy, without the fields that have their default; nil for a policy that is not of this
// package.
func textOf(policy Policy) any {
	switch p := policy.(type) {
	case TokenBucket:
		return bucketText{
			KindTokenBucket, p.Rate, span(p.Period), amountOf(p.Capacity, p.Rate), owedOf(p.MaxReserved), without(p.Shards, 1), span(p.Prefetch),
		}
	case FixedWindow:
		bucket := bucketText{
			KindFixedWindow, p.Rate, span(p.Period), amountOf(p.Capacity, p.Rate), owedOf(p.MaxReserved), without(p.Shards, 1), span(p.Prefetch),
		}
		return fixedText{bucket, instantText{p.Start}}
	case SlidingWindow:
		return slidingText{KindSlidingWindow, p.Rate, span(p.Period), without(p.Slices, int(dividing(p.Period.Microseconds())))}
	case CalendarWindow:
		return calendarText{
			KindCalendarWindow, p.Rate, p.Resets, without(p.Zone, "UTC"), weekday(p.FirstWeekday), without(p.FirstDay, 1),
			month(without(p.FirstMonth, time.January)), owedOf(without(p.MaxReserved, p.Rate)),
		}
	case Concurrency:
		return slotsText{KindConcurrency, p.Most, span(without(p.Lease, time.Minute))}
	}
	return nil
}

// without returns v, and the zero value for the default.
func without[T comparable](v, standard T) (zero T) {
	if v == standard {
		return zero
	}
	return v
}

func (t *bucketText) policy() (Policy, error) {
	if t.Rate != 0 && t.Period == 0 {
		return nil, fields.Errorf("period", "is missing; say in which time the rate arrives, such as 1m")
	}
	return TokenBucket{
		Rate: t.Rate, Period: time.Duration(t.Period), Capacity: t.Capacity.tokens(), MaxReserved: t.MaxReserved.tokens(),
		Shards: t.Shards, Prefetch: time.Duration(t.Prefetch),
	}, nil
}

func (t *fixedText) policy() (Policy, error) {
	p, err := t.bucketText.policy()
	if err != nil {
		return nil, err
	}
	b := p.(TokenBucket)
	return FixedWindow{
		Rate: b.Rate, Period: b.Period, Capacity: b.Capacity, MaxReserved: b.MaxReserved, Shards: b.Shards, Prefetch: b.Prefetch, Start: t.Start.Time,
	}, nil
}

func (t *slidingText) policy() (Policy, error) {
	if t.Rate != 0 && t.Period == 0 {
		return nil, fields.Errorf("period", "is missing; say in which time there are at most rate tokens, such as 1m")
	}
	return SlidingWindow{Rate: t.Rate, Period: time.Duration(t.Period), Slices: t.Slices}, nil
}

func (t *calendarText) policy() (Policy, error) {
	return CalendarWindow{
		Rate: t.Rate, Resets: t.Resets, Zone: t.Zone, FirstWeekday: time.Weekday(t.FirstWeekday), FirstDay: t.FirstDay,
		FirstMonth: time.Month(t.FirstMonth), MaxReserved: t.MaxReserved.tokens(),
	}, nil
}

func (t *slotsText) policy() (Policy, error) {
	return Concurrency{Most: t.Most, Lease: time.Duration(t.Lease)}, nil
}

// span is a time.Duration as text.
type span time.Duration

func (s span) MarshalJSON() ([]byte, error) { return json.Marshal(words.Span(time.Duration(s))) }

func (s *span) UnmarshalJSON(data []byte) error {
	var text string
	if json.Unmarshal(data, &text) != nil {
		text = ""
	}
	d, err := words.ParseSpan(text)
	*s = span(d)
	return err
}

// amount is a Capacity as text: 0 is none.
type amount float64

func amountOf(tokens, standard float64) *amount {
	if tokens == 0 || tokens == standard {
		return nil
	}
	return new(amount(max(tokens, 0)))
}

func (a *amount) UnmarshalJSON(data []byte) error {
	if err := json.Unmarshal(data, (*float64)(a)); err != nil || *a < 0 {
		return errors.New("write a number above 0, or 0 for none, or leave it out for the default")
	}
	return nil
}

func (a *amount) tokens() float64 {
	if a == nil {
		return 0
	}
	return cmp.Or(float64(*a), None)
}

// maxOwed is a MaxReserved as text: 0 is None.
type maxOwed float64

// forbidden is NoReservations as text.
const forbidden = `"forbidden"`

func owedOf(tokens float64) *maxOwed {
	switch tokens {
	case 0:
		return nil
	case None:
		tokens = 0
	}
	return new(maxOwed(tokens))
}

func (m maxOwed) MarshalJSON() ([]byte, error) {
	if m == NoReservations {
		return []byte(forbidden), nil
	}
	return json.Marshal(float64(m))
}

func (m *maxOwed) UnmarshalJSON(data []byte) error {
	if string(data) == forbidden {
		*m = NoReservations
		return nil
	}
	if err := json.Unmarshal(data, (*float64)(m)); err != nil || *m < 0 {
		return fmt.Errorf("write a number above 0, or 0 to reserve only what is there, or %s, or leave it out for the default", forbidden)
	}
	return nil
}

func (m *maxOwed) tokens() float64 {
	if m == nil {
		return 0
	}
	return cmp.Or(float64(*m), None)
}

// instantText is a Start as text.
type instantText struct{ time.Time }

func (t instantText) MarshalJSON() ([]byte, error) { return t.UTC().MarshalJSON() }

func (t *instantText) UnmarshalJSON(data []byte) error {
	if t.Time.UnmarshalJSON(data) != nil {
		return errors.New("write an instant such as 2026-01-31T15:04:05Z")
	}
	t.Time = t.UTC()
	return nil
}

// weekday is a FirstWeekday as text, and month a FirstMonth.
type (
	weekday time.Weekday
	month   time.Month
)

func (d weekday) MarshalJSON() ([]byte, error) {
	return json.Marshal(strings.ToLower(time.Weekday(d).String()))
}

func (m month) MarshalJSON() ([]byte, error) {
	return json.Marshal(strings.ToLower(time.Month(m).String()))
}

func (d *weekday) UnmarshalJSON(data []byte) error {
	return nameOf(data, (*time.Weekday)(d), time.Sunday, time.Saturday)
}

func (m *month) UnmarshalJSON(data []byte) error {
	return nameOf(data, (*time.Month)(m), time.January, time.December)
}

// nameOf sets v to the value from first to last that has the name in data.
func nameOf[T interface {
	~int
	String() string
}](data []byte, v *T, first, last T) error {
	var names []string
	for *v = first; *v <= last; *v++ {
		name := strings.ToLower((*v).String())
		if string(data) == `"`+name+`"` {
			return nil
		}
		names = append(names, name)
	}
	return fmt.Errorf("use one of %s", strings.Join(names, ", "))
}
