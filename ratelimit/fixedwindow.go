package ratelimit

import (
	"errors"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
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
	// Prefetch is how long a process may keep tokens that it takes ahead, to answer from memory, as in [TokenBucket]: whole
	// microseconds, from 1ms to 1h, and no longer than the Period. Defaults to 0: none are taken ahead.
	//
	// The promise above holds exactly, over all processes, and the row holds all of the Capacity. For what is taken ahead is used in
	// the window in which it was taken from the row, or not at all: it may be used no longer than that lasts by the database's clock.
	// What is given back while it lasts counts as never taken. What is left at its end is lost, and does not roll over.
	Prefetch time.Duration
}

// String returns the policy in words, as in "100 per hour (fixed window)".
func (p FixedWindow) String() string {
	return describe(p.Rate, p.Period, p.Capacity) + " (fixed window)" + describePrefetch(p.Prefetch)
}

func (p FixedWindow) compile() (bucket.Terms, error) {
	t, err := compile(p.Rate, p.Period, p.Capacity, p.MaxReserved, p.Shards)
	if err != nil {
		return bucket.Terms{}, err
	}
	t.Step, t.Steps = p.Period.Microseconds(), 1
	if p.Prefetch != 0 {
		if t, err = p.prefetched(t); err != nil {
			return bucket.Terms{}, err
		}
	}
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

// prefetched returns the terms of windows that tokens are taken ahead of.
func (p FixedWindow) prefetched(t bucket.Terms) (bucket.Terms, error) {
	if err := checkPrefetch(p.Prefetch, p.Shards); err != nil {
		return bucket.Terms{}, err
	}
	if p.Prefetch > p.Period {
		return bucket.Terms{}, fmt.Errorf("its Prefetch is %v, and its windows end after %v; it must be that or less", p.Prefetch, p.Period)
	}
	if t.Capacity == 0 {
		return bucket.Terms{}, errors.New("it has a Prefetch and NoCapacity, of which nothing can be taken ahead; leave one of them out")
	}
	t.Prefetch = p.Prefetch.Microseconds()
	return t, nil
}
