package ratelimit

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/strictjson"
	"github.com/pgratelimit/pgratelimit/internal/words"
)

// MarshalPolicy returns a policy as a JSON object, in the form that rules files, the rules table and the command line
// use:
//
//	{"kind":"token bucket","rate":10,"period":"1m","capacity":50}
//
// It leaves out fields with their default, and writes a capacity or max_reserved of None as 0. Errors wrap
// ErrInvalidLimit.
func MarshalPolicy(policy Policy) ([]byte, error) {
	if arg.IsNil(policy) {
		return nil, fmt.Errorf("%w: there is no policy", ErrInvalidLimit)
	}
	policy = valueOf(policy)
	text := policy.text()
	_, err := policy.compile()
	if err == nil && text == nil {
		err = errors.New("only a reservation has it; read the policy of a limit instead")
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidLimit, err)
	}
	return json.Marshal(text)
}

// UnmarshalPolicy parses a policy that MarshalPolicy or a person wrote. The kind defaults to "token bucket". A field
// that the kind doesn't have, or that occurs twice, is an error. Errors wrap ErrInvalidLimit, and say what to write
// instead.
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

// maxDebt is a MaxReserved as text: 0 is None.
type maxDebt float64

// forbidden is NoReservations as text.
const forbidden = `"forbidden"`

func owedOf(tokens float64) *maxDebt {
	switch tokens {
	case 0:
		return nil
	case None:
		tokens = 0
	}
	return new(maxDebt(tokens))
}

func (m maxDebt) MarshalJSON() ([]byte, error) {
	if m == NoReservations {
		return []byte(forbidden), nil
	}
	return json.Marshal(float64(m))
}

func (m *maxDebt) UnmarshalJSON(data []byte) error {
	if string(data) == forbidden {
		*m = NoReservations
		return nil
	}
	if err := json.Unmarshal(data, (*float64)(m)); err != nil || *m < 0 {
		return fmt.Errorf("write a number above 0, or 0 to reserve only available tokens, or %s, or leave it out for the "+
			"default", forbidden)
	}
	return nil
}

func (m *maxDebt) tokens() float64 {
	if m == nil {
		return 0
	}
	return cmp.Or(float64(*m), None)
}

type instantText struct{ time.Time }

func (t instantText) MarshalJSON() ([]byte, error) { return t.UTC().MarshalJSON() }

func (t *instantText) UnmarshalJSON(data []byte) error {
	if t.Time.UnmarshalJSON(data) != nil {
		return errors.New("write a time such as 2026-01-31T15:04:05Z")
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

// Spec are what all kinds of policy have in common.
type Spec struct {
	// Kind is the kind of policy, as MarshalPolicy writes it.
	Kind Kind
	// Capacity is the maximum number of tokens at once: the largest cost that Take accepts, or the number of slots.
	Capacity float64
	// Rate is the number of tokens that are added each Period. For a [SlidingWindow], it is the most in any Period. For a
	// [Concurrency], it is the number of slots.
	Rate float64
	// Period is the time in which Rate tokens are added: the length of a window, or of a lease. A month is 30 days, a
	// quarter 91 and a year 365.
	Period time.Duration
	// Resets is the length of a window of a [CalendarWindow]. It is empty for other kinds.
	Resets Calendar
	// MaxDebt is the maximum number of tokens that Reserve can owe.
	MaxDebt float64
	// Shards is the number of rows of a bucket.
	Shards int
}

// Spec returns the numbers of the limit's policy. The zero Limit has zero Spec.
func (l Limit) Spec() Spec {
	if l.isZero() {
		return Spec{}
	}
	d := l.definition()
	t := timesTokens(d.terms, float64(d.shards))
	n := Spec{
		Kind: kindOf(&t), Capacity: t.Capacity, Rate: t.Rate, MaxDebt: t.MaxDebt, Shards: d.shards,
		Period: time.Duration(float64(t.Step)*t.Steps) * time.Microsecond,
	}
	if p, ok := l.Policy().(CalendarWindow); ok {
		n.Resets = p.Resets
	}
	return n
}

func kindOf(t *bucket.Terms) Kind {
	switch t.Kind.(type) {
	case bucket.Sliding:
		return KindSlidingWindow
	case bucket.Concurrent:
		return KindConcurrency
	}
	switch {
	case t.Windows != nil:
		return KindCalendarWindow
	case t.Step > 1: // windows of a microsecond are a token bucket
		return KindFixedWindow
	}
	return KindTokenBucket
}

// Scale returns the policy with its numbers of tokens multiplied by times, or by the nearest possible factor. Slots are
// rounded down, to at least 1. A capacity of 1 or more stays at least 1, and so does MaxReserved without a capacity, so
// a request with the default cost is never an error.
func Scale(policy Policy, times float64) Policy {
	scaled := policy.scaled(times)
	if _, err := NewLimit("scaled", scaled); err != nil { // rounding at the edge of what a policy can have
		return policy
	}
	return scaled
}

// scaleTokens multiplies the numbers above 0 by the same factor: times, or the nearest factor that keeps all of them in
// range.
func scaleTokens(times float64, tokens ...*float64) {
	for _, t := range tokens {
		if *t > 0 {
			times = min(max(times, bucket.MinTokens / *t), bucket.MaxTokens / *t)
		}
	}
	for _, t := range tokens {
		if *t > 0 {
			*t = min(max(*t*times, bucket.MinTokens), bucket.MaxTokens)
		}
	}
}

// scaleSteps is scaleTokens for a policy with a rate and a capacity. The capacity does not fall below 1, nor does
// MaxReserved if only reservations get tokens.
func scaleSteps(times float64, rate, capacity, maxReserved *float64) {
	before, reserved := cmp.Or(*capacity, *rate), *maxReserved
	scaleTokens(times, rate, capacity, maxReserved)
	if least := min(before, 1); cmp.Or(*capacity, *rate) < least {
		*capacity = least
	}
	if *capacity == None {
		*maxReserved = max(*maxReserved, min(reserved, 1))
	}
}

// scaleRate is scaleTokens for a policy whose rate is its capacity, which does not fall below 1.
func scaleRate(times float64, rate *float64, others ...*float64) {
	least := min(*rate, 1)
	scaleTokens(times, append(others, rate)...)
	*rate = max(*rate, least)
}
