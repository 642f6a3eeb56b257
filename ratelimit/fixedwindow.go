package ratelimit

import (
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/strictjson"
	"github.com/pgratelimit/pgratelimit/internal/words"
)

// FixedWindow adds Rate tokens at the start of each window of length Period, up to Capacity.
//
//	tokens = min(Capacity, value + windows * Rate)
//
// In one window at most Capacity tokens are taken, and in any span of a Period at most twice Capacity: at the end of
// one window and the start of the next. If Capacity is above Rate, unused tokens roll over.
type FixedWindow struct {
	// Rate is the number of tokens added with each window: from 1e-9 to 1e12.
	Rate float64
	// Period is the length of a window: whole microseconds, up to 100 years.
	Period time.Duration
	// Capacity is the maximum number of tokens in the bucket, and so the largest cost that Take accepts. Defaults to Rate.
	// None stores no tokens.
	Capacity float64
	// MaxReserved is the maximum number of tokens that the bucket can owe to reservations, as in [TokenBucket].
	MaxReserved float64
	// Start is the start of any one window, past or future, and determines all others. The zero time derives the windows
	// from the limit's name and the key, so different keys' windows start at different times, and their clients don't all
	// return at once. If you change Start, a bucket uses the new windows from the next start of one of them.
	Start time.Time
	// Shards is the number of rows, as in [TokenBucket].
	Shards int
}

// String returns the policy as text, such as "100 per hour (fixed window)".
func (p FixedWindow) String() string {
	text := describe(p.Rate, p.Period, p.Capacity) + " (fixed window"
	if !p.Start.IsZero() {
		text += ", one starts at " + p.Start.UTC().Format(time.RFC3339Nano)
	}
	return text + ")" + describeRest(p.MaxReserved, p.Shards)
}

func (p FixedWindow) compile() (bucket.Terms, error) {
	t, err := compile(p.Rate, p.Period, p.Capacity, p.MaxReserved, p.Shards)
	if err != nil {
		return bucket.Terms{}, err
	}
	t.Step, t.Steps = p.Period.Microseconds(), 1
	if p.Start.IsZero() {
		t.PhaseByKey = true
		return t, nil
	}
	if p.Start.Before(time.UnixMicro(bucket.MinInstant)) || p.Start.After(time.UnixMicro(bucket.MaxInstant)) {
		return bucket.Terms{}, fmt.Errorf("its Start is %v; it must be from year 1 to year 9999", p.Start)
	}
	t.Phase = bucket.PhaseOf(p.Start.UnixMicro(), t.Step)
	return t, nil
}

type fixedText struct {
	bucketText
	Start instantText `json:"start,omitzero"`
}

func (p FixedWindow) text() policyText {
	return &fixedText{bucketText{
		KindFixedWindow, p.Rate, span(p.Period), amountOf(p.Capacity, p.Rate), owedOf(p.MaxReserved), without(p.Shards, 1),
	}, instantText{p.Start}}
}

func (t *fixedText) policy() (Policy, error) {
	p, err := t.bucketText.policy()
	if err != nil {
		return nil, err
	}
	b := p.(TokenBucket)
	return FixedWindow{
		Rate: b.Rate, Period: b.Period, Capacity: b.Capacity, MaxReserved: b.MaxReserved, Shards: b.Shards,
		Start: t.Start.Time,
	}, nil
}

func (p FixedWindow) scaled(times float64) Policy {
	scaleSteps(times, &p.Rate, &p.Capacity, &p.MaxReserved)
	return p
}

// SlidingWindow allows at most Rate tokens in any span of a Period.
//
//	tokens = Rate - tokens taken in the last Period
//
// Taken tokens are counted in Slices of the Period, and a slice counts until all of it is more than a Period ago. So a
// token never returns too early, and at most Period / Slices late. Refusals aren't counted, and RetryAfter is exact.
//
// Reserve returns ErrNoReservations. Credit returns the tokens that were taken last, CreditTaken those of the slice at
// its time, while that slice counts, and Charge counts as taken now. If the clock steps back by up to a minute, tokens
// count as taken at the latest time that the row has seen.
//
// If you change the policy, taken tokens still count. With another Period or other Slices, a token counts as taken at
// the end of its old slice, and a longer Period can count tokens again. After a change from another kind in the code,
// the tokens that the bucket lacks count as taken when its row was last written, or for a [FixedWindow] or
// [CalendarWindow] when its window began, which can be more than a Period ago.
type SlidingWindow struct {
	// Rate is the maximum number of tokens in any Period, and so the largest cost: from 1e-9 to 1e12.
	Rate float64
	// Period is the length of the window: whole microseconds, up to 100 years.
	Period time.Duration
	// Slices is the number of parts in which the Period is counted, from 1 to 128. It must divide the Period into whole
	// microseconds. With more slices, tokens return sooner after a Period, but the row is up to 8 bytes longer for each.
	// Defaults to the largest number up to 60 that divides the Period: 60 for whole minutes and most other periods.
	Slices int
}

// String returns the policy as text, such as "never more than 100 in any minute".
func (p SlidingWindow) String() string {
	text := "never more than " + words.InAny(p.Rate, p.Period)
	if p.Slices != 0 && int64(p.Slices) != dividing(p.Period.Microseconds()) {
		text += fmt.Sprintf(", counted in %d slices", p.Slices)
	}
	return text
}

func (p SlidingWindow) compile() (bucket.Terms, error) {
	t, err := compile(p.Rate, p.Period, 0, NoReservations, 1)
	if err != nil {
		return bucket.Terms{}, err
	}
	us, slices := p.Period.Microseconds(), int64(p.Slices)
	if slices == 0 {
		slices = dividing(us)
	}
	if slices < 1 || slices > bucket.MaxSlices {
		return bucket.Terms{}, fmt.Errorf("its Slices is %d; it must be from 1 to %d, or 0 for %d", p.Slices,
			bucket.MaxSlices, dividing(us))
	}
	if us%slices != 0 {
		return bucket.Terms{}, fmt.Errorf("its Period of %v is no whole number of microseconds for each of %d Slices; "+
			"leave out Slices for %d, or set it to a number that divides %d", p.Period, slices, dividing(us), us)
	}
	t.Step, t.Steps, t.Phase = us/slices, float64(slices), bucket.MinInstant
	t.Kind = bucket.Sliding{Slices: int32(slices)}
	return t, nil
}

// dividing returns the default number of slices of a period of us microseconds.
func dividing(us int64) int64 {
	for slices := int64(60); ; slices-- {
		if us%slices == 0 {
			return slices
		}
	}
}

type slidingText struct {
	Kind   Kind    `json:"kind"`
	Rate   float64 `json:"rate"`
	Period span    `json:"period"`
	Slices int     `json:"slices,omitempty"`
}

func (p SlidingWindow) text() policyText {
	return &slidingText{
		KindSlidingWindow, p.Rate, span(p.Period),
		without(p.Slices, int(dividing(p.Period.Microseconds()))),
	}
}

func (t *slidingText) policy() (Policy, error) {
	if t.Rate != 0 && t.Period == 0 {
		return nil, strictjson.Errorf("period", "is missing; write the time in which rate tokens are allowed, such as 1m")
	}
	return SlidingWindow{Rate: t.Rate, Period: time.Duration(t.Period), Slices: t.Slices}, nil
}

func (p SlidingWindow) scaled(times float64) Policy {
	scaleRate(times, &p.Rate)
	return p
}
