package ratelimit

import (
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// FixedWindow adds Rate tokens at the start of each window of length Period, up to Capacity.
//
//	tokens = min(Capacity, value + windows * Rate)
//
// In one window at most Capacity tokens are taken. In any span of a Period at most twice Capacity is taken: at the end
// of one window and at the start of the next. If Capacity is above Rate, unused tokens roll over.
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
	// Start is the start of any one window, past or future; it determines all others. The zero time derives the windows
	// from the limit's name and the key. So the windows of different keys start at different times, and their clients do
	// not all return at once. If you change Start of a limit in use, a bucket uses the new windows from the next start of
	// one of them.
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

// fixedText is a FixedWindow as text.
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
