package ratelimit

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/internal/strictjson"
	"github.com/pgratelimit/pgratelimit/internal/words"
)

// MarshalPolicy returns a policy as a JSON object, as rules files, the table of rules and the command line write it:
//
//	{"kind":"token bucket","rate":10,"period":"1m","capacity":50}
//
// Fields with their default are left out. A capacity and a max_reserved of 0 are [None]. Errors wrap
// ErrInvalidLimit, if NewLimit rejects the policy.
func MarshalPolicy(policy Policy) ([]byte, error) {
	if arg.IsNil(policy) {
		return nil, fmt.Errorf("%w: there is no policy", ErrInvalidLimit)
	}
	policy = valueOf(policy)
	if _, err := policy.compile(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidLimit, err)
	}
	return json.Marshal(policy.text())
}

// UnmarshalPolicy parses a JSON object that MarshalPolicy wrote, or a person. The kind defaults to "token bucket". It
// returns an error for a field that the kind does not have and for a field that occurs twice. Errors wrap
// ErrInvalidLimit, and say what to write instead.
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
	said, err := strictjson.Parse(data)
	if err != nil {
		return nil, err
	}
	named := struct {
		Kind Kind `json:"kind"`
	}{KindTokenBucket}
	if _, err := said.Take(&named); err != nil {
		return nil, err
	}
	made := newText[named.Kind]
	if made == nil {
		return nil, strictjson.Errorf("kind", "is %.40q; use one of %s, %s, %s, %s, %s", string(named.Kind),
			KindTokenBucket, KindFixedWindow, KindSlidingWindow, KindCalendarWindow, KindConcurrency)
	}
	text := made()
	if err := said.Decode(text, "a "+string(named.Kind)); err != nil {
		return nil, err
	}
	return text.policy()
}

// Kind is the name of a kind of policy.
type Kind string

// The kinds of policy.
const (
	KindTokenBucket    Kind = "token bucket"
	KindFixedWindow    Kind = "fixed window"
	KindSlidingWindow  Kind = "sliding window"
	KindCalendarWindow Kind = "calendar window"
	KindConcurrency    Kind = "concurrency"
)

// policyText has the fields of one kind of policy as they are written, without those that have their default.
type policyText interface{ policy() (Policy, error) }

// newText returns the empty fields of each kind.
var newText = map[Kind]func() policyText{ //nolint:gochecknoglobals // a table
	KindTokenBucket:    func() policyText { return &bucketText{} },
	KindFixedWindow:    func() policyText { return &fixedText{} },
	KindSlidingWindow:  func() policyText { return &slidingText{} },
	KindCalendarWindow: func() policyText { return &calendarText{} },
	KindConcurrency:    func() policyText { return &slotsText{} },
}

// without returns v, and the zero value for the default.
func without[T comparable](v, standard T) (zero T) {
	if v == standard {
		return zero
	}
	return v
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
