package ratelimit

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/words"
)

// FieldError is the error of one field of a policy as text. UnmarshalPolicy returns it, so that a reader of files can name the
// line of the field.
type FieldError struct {
	// Field is the name of the field, such as "period".
	Field string
	// Problem says what is wrong with it, and what to write instead.
	Problem string
}

// Error returns the name of the field and the problem.
func (e *FieldError) Error() string { return fmt.Sprintf("%q %s", e.Field, e.Problem) }

func fieldError(field, problem string, args ...any) error {
	return &FieldError{field, fmt.Sprintf(problem, args...)}
}

// MarshalPolicy returns a policy as a JSON object, as rules files, the table of rules and the command line write it:
//
//	{"kind":"token bucket","rate":10,"period":"1m","capacity":50}
//
// Fields with their default are left out. A capacity of 0 is [NoCapacity], and a max_reserved of 0 is [NoDebt]. Errors wrap
// ErrInvalidLimit: the policy is one that NewLimit rejects, or not of this package.
func MarshalPolicy(policy Policy) ([]byte, error) {
	if _, err := NewLimit("policy", policy); err != nil {
		return nil, err
	}
	policy = valueOf(policy)
	var prices *adaptiveText
	if a, adapts := policy.(Adaptive); adapts {
		prices = &adaptiveText{a.Floor, a.Growth, span(a.Epoch), a.Apply}
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
// an error for a field that the kind does not have and for a field that occurs twice. Errors wrap ErrInvalidLimit and say
// what to write instead; an error of one field is a [FieldError].
func UnmarshalPolicy(data []byte) (Policy, error) {
	policy, err := unmarshalPolicy(data)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidLimit, err)
	}
	if _, err := NewLimit("policy", policy); err != nil {
		return nil, err
	}
	return policy, nil
}

func unmarshalPolicy(data []byte) (Policy, error) {
	said, err := fieldsOf(data)
	if err != nil {
		return nil, err
	}
	kind := KindTokenBucket
	if text, ok := said["kind"]; ok {
		if err := decodeField("kind", text, &kind); err != nil {
			return nil, err
		}
		delete(said, "kind")
	}
	text := newText(kind)
	if text == nil {
		return nil, fieldError("kind", "is %.40q; use one of %s, %s, %s, %s, %s", string(kind),
			KindTokenBucket, KindFixedWindow, KindSlidingWindow, KindCalendarWindow, KindConcurrency)
	}
	prices, adapts := said["adaptive"]
	if kind != KindSlidingWindow && kind != KindConcurrency {
		delete(said, "adaptive") // of the others it is a field that they do not have
	}
	if err := decodeFields(said, text, "a "+string(kind)); err != nil {
		return nil, err
	}
	policy, err := text.policy()
	if err != nil || !adapts {
		return policy, err
	}
	var a adaptiveText
	if said, err = fieldsOf(prices); err == nil {
		err = decodeFields(said, &a, "adaptive")
	}
	if err != nil {
		return nil, err
	}
	return Adaptive{Contract: policy, Floor: a.Floor, Growth: a.Growth, Epoch: time.Duration(a.Epoch), Apply: a.Apply}, nil
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
		Floor  float64 `json:"floor,omitempty"`
		Growth float64 `json:"growth,omitempty"`
		Epoch  span    `json:"epoch,omitempty"`
		Apply  bool    `json:"apply"`
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

// textOf returns a policy as it is written; nil for a policy that is not of this package.
func textOf(policy Policy) any {
	switch p := policy.(type) {
	case TokenBucket:
		return bucketText{KindTokenBucket, p.Rate, span(p.Period), amountOf(p.Capacity), owedOf(p.MaxReserved), p.Shards, span(p.Prefetch)}
	case FixedWindow:
		return fixedText{
			bucketText{KindFixedWindow, p.Rate, span(p.Period), amountOf(p.Capacity), owedOf(p.MaxReserved), p.Shards, span(p.Prefetch)},
			instantText{p.Start},
		}
	case SlidingWindow:
		return slidingText{KindSlidingWindow, p.Rate, span(p.Period), p.Slices}
	case CalendarWindow:
		return calendarText{
			KindCalendarWindow, p.Rate, p.Resets, p.Zone, weekday(p.FirstWeekday), p.FirstDay, month(p.FirstMonth), owedOf(p.MaxReserved),
		}
	case Concurrency:
		return slotsText{KindConcurrency, p.Most, span(p.Lease)}
	}
	return nil
}

func (t *bucketText) policy() (Policy, error) {
	if t.Rate != 0 && t.Period == 0 {
		return nil, fieldError("period", "is missing; say in which time the rate arrives, such as 1m")
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
		return nil, fieldError("period", "is missing; say in which time there are at most rate tokens, such as 1m")
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

// fieldsOf returns the fields of a JSON object. It returns an error for one that occurs twice. A field with null is left out.
func fieldsOf(data []byte) (map[string]json.RawMessage, error) {
	d := json.NewDecoder(bytes.NewReader(data))
	if open, err := d.Token(); err != nil || open != json.Delim('{') {
		return nil, cmp.Or(err, errors.New("it is no JSON object; write its fields in braces"))
	}
	fields, seen := map[string]json.RawMessage{}, map[string]bool{}
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return nil, err
		}
		field, _ := name.(string)
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return nil, err
		}
		if seen[field] {
			return nil, fieldError(field, "is there twice; keep one")
		}
		if seen[field] = true; string(value) != "null" {
			fields[field] = value
		}
	}
	if _, err := d.Token(); err != nil {
		return nil, errors.New("the object has no end")
	}
	if d.More() {
		return nil, errors.New("there is more after the object")
	}
	return fields, nil
}

// decodeFields decodes the fields of a policy into the struct that into points to. It returns an error for a field that the
// struct does not have.
func decodeFields(said map[string]json.RawMessage, into any, what string) error {
	known := make(map[string]any)
	var names []string
	for _, f := range reflect.VisibleFields(reflect.TypeOf(into).Elem()) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name != "" && name != "kind" {
			known[name] = reflect.ValueOf(into).Elem().FieldByIndex(f.Index).Addr().Interface()
			names = append(names, name)
		}
	}
	fields := make([]string, 0, len(said))
	for field := range said {
		fields = append(fields, field)
	}
	slices.Sort(fields) // the same error each time
	for _, field := range fields {
		if known[field] == nil {
			return fieldError(field, "means nothing for %s; there are %s", what, strings.Join(names, ", "))
		}
		if err := decodeField(field, said[field], known[field]); err != nil {
			return err
		}
	}
	return nil
}

// decodeField decodes one field.
func decodeField(field string, data []byte, into any) error {
	err := json.Unmarshal(data, into)
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return fieldError(field, "is %.40s; write %s", data, wordOf(wrong.Type.Kind()))
	}
	if err != nil {
		return fieldError(field, "is %.40s; %v", data, err)
	}
	return nil
}

// wordOf returns what a field of the Go type is in JSON.
func wordOf(kind reflect.Kind) string {
	names := map[reflect.Kind]string{reflect.String: "a text in quotes", reflect.Bool: "true or false", reflect.Int: "a whole number"}
	return cmp.Or(names[kind], "a number")
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

func amountOf(tokens float64) *amount {
	if tokens == 0 {
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
	return cmp.Or(float64(*a), NoCapacity)
}

// maxOwed is a MaxReserved as text: 0 is NoDebt.
type maxOwed float64

// forbidden is NoReservations as text.
const forbidden = `"forbidden"`

func owedOf(tokens float64) *maxOwed {
	switch tokens {
	case 0:
		return nil
	case NoDebt:
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
	return cmp.Or(float64(*m), NoDebt)
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
