package ratelimit

import (
	"fmt"
	"hash/fnv"
	"time"
)

// FixedWindow adds Rate tokens at once at the start of each window of length Period, up to Capacity.
//
//	tokens = min(Capacity, value + windows * Rate)
//
// In one window at most Capacity tokens are taken, and in any span of a Period at most twice that: at the
// end of one window and the start of the next. Unused tokens roll over when Capacity is above Rate.
type FixedWindow struct {
	// Rate is the number of tokens that arrive with each window: from 1e-9 to 1e12.
	Rate float64
	// Period is the length of a window: whole microseconds, up to 100 years.
	Period time.Duration
	// Capacity is the most the bucket holds, and so the largest cost Take accepts. Defaults to Rate.
	// NoCapacity holds nothing.
	Capacity float64
	// MaxReserved is how many tokens Reserve may owe, as in [TokenBucket].
	MaxReserved float64
	// Start is the start of some window, past or future; the others follow from it in both directions. The
	// zero time derives it from the limit's name and the key, so that different keys roll over at different
	// moments and nobody's clients all return at once. When Start of a limit in use is changed, the row
	// falls into the new windows at the next of their starts.
	Start time.Time
	// Shards is the number of rows, as in [TokenBucket].
	Shards int
}

// String returns the policy in words, as in "100 per 1h0m0s (fixed window)".
func (p FixedWindow) String() string {
	return describe(p.Rate, p.Period, p.Capacity) + " (fixed window)"
}

func (p FixedWindow) compile() (terms, error) {
	t, err := compile(p.Rate, p.Period, p.Capacity, p.MaxReserved, p.Shards)
	if err != nil {
		return terms{}, err
	}
	t.step, t.steps = p.Period.Microseconds(), 1
	if p.Start.IsZero() {
		t.spread = true
		return t, nil
	}
	if p.Start.Before(time.UnixMicro(minInstant)) || p.Start.After(time.UnixMicro(maxInstant)) {
		return terms{}, fmt.Errorf("its Start is %v; it must be from year 1 to year 9999", p.Start)
	}
	t.phase = phaseOf(p.Start.UnixMicro(), t.step)
	return t, nil
}

// termsFor returns the terms of the bucket of key: where the policy does not say when a window begins, these do.
func (l Limit) termsFor(key string) terms {
	t := l.terms
	if !t.spread {
		return t
	}
	h := fnv.New64a()
	h.Write([]byte(l.name))
	h.Write([]byte{0})
	h.Write([]byte(key))
	t.phase = phaseOf(int64(h.Sum64()%uint64(t.step)), t.step)
	return t
}

// phaseOf returns the first instant from minInstant on that lies a whole number of steps from start. What comes
// before it has a ts that no row can hold: begin, which divides towards zero as Postgres does, counts it to the
// step of the phase itself.
func phaseOf(start, step int64) int64 {
	return minInstant + (start%step-minInstant%step+2*step)%step
}
