package ratelimit

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/words"
)

// Spans that package time has no name for.
const (
	Day  = 24 * time.Hour
	Week = 7 * Day
)

const (
	// NoReservations as MaxReserved forbids reservations.
	NoReservations = -math.MaxFloat64

	// NoDebt as MaxReserved reserves only what is there, so that it can be settled and cancelled, and is
	// refused when it is not.
	NoDebt = -math.MaxFloat64 / 2

	// NoCapacity as Capacity keeps nothing in store: every request has to be reserved and waits its turn,
	// which spaces requests as evenly as their costs allow. Take always fails on such a limit.
	NoCapacity = -math.MaxFloat64
)

// TokenBucket adds tokens continuously: Rate tokens each Period, up to Capacity.
//
//	tokens = min(Capacity, value + elapsed * Rate / Period)
//
// In any span t at most Capacity + Rate * t / Period tokens are taken, however the requests fall. A
// rollback gives back what its transaction took. The algorithm is the continuous-state leaky bucket of
// ITU-T I.371, turned around to count what is left.
type TokenBucket struct {
	// Rate is the number of tokens that arrive each Period: from 1e-9 to 1e12.
	Rate float64
	// Period is the time over which Rate tokens arrive: whole microseconds, up to 100 years.
	Period time.Duration
	// Capacity is the most the bucket holds, and so the largest cost Take accepts; elsewhere it is called
	// burst. Defaults to Rate. NoCapacity holds nothing.
	Capacity float64
	// MaxReserved is how many tokens Reserve may owe. Defaults to no bound but the arithmetic's (1e12 tokens,
	// or what arrives in 100 years); NoDebt reserves only what is there, NoReservations forbids reserving.
	MaxReserved float64
	// Shards spreads a bucket over so many rows, each of them holding and gaining its part: a power of two up to 64.
	// Defaults to 1, on which every transaction that takes from the bucket waits for the one before it to
	// end, or at SERIALIZABLE is undone by it. With n rows that is so only for those at the same row: about
	// n times as many get through when they are long, or come from many processes.
	//
	// The limit stays exact. A call takes from one row at random, or if that is short from all together, and is refused
	// only when these are short. What an allowed call says is left is an estimate; see Decision. A row that is full gains nothing while others are
	// not, so the bucket may fill more slowly than on one row, and never gives more. Changing Shards in use, in the code, starts
	// the rows that are new full, and leaves out what those that are not used any more hold or owe. A rule can change
	// them only with ResetTokens.
	//
	// All rows are locked for a cost above Capacity / Shards, for what is owed, and by Settle, Cancel, Credit, Charge
	// and Reset, so keep usual costs well below that: at SERIALIZABLE such a call loses against every transaction
	// of another process at any of the rows. A transaction that takes from the bucket and then locks all of its
	// rows can deadlock with another that does so, which InTx runs again.
	Shards int
	// Prefetch is how long a process may keep tokens that it takes ahead, to answer from memory: whole microseconds, from
	// 1ms to the time in which half of the Capacity arrives. Defaults to 0: none are taken ahead. It is for keys that many
	// calls outside of transactions share. All processes need the same; see docs/prefetch.md.
	//
	// The promise above holds exactly, over all processes. The row of the bucket holds Capacity - Rate * Prefetch / Period,
	// and that is what [Limit.Capacity] says, and the largest cost. For what is admitted in a span t was taken from the row
	// in a span of t + Prefetch, and in that the row gives no more than what it holds + Rate * (t + Prefetch) / Period.
	// What is given back is less what has arrived since it was taken, so that the row is never fuller than if it
	// had never been taken.
	//
	// It is of use for Take alone. Every other call, and each in a transaction, goes by the row, in which what processes
	// keep is missing. Where the row refuses there may be tokens that another process keeps.
	Prefetch time.Duration
}

// PerSecond is a token bucket of n tokens a second, holding n.
func PerSecond(n float64) TokenBucket { return TokenBucket{Rate: n, Period: time.Second} }

// PerMinute is a token bucket of n tokens a minute, holding n.
func PerMinute(n float64) TokenBucket { return TokenBucket{Rate: n, Period: time.Minute} }

// PerHour is a token bucket of n tokens an hour, holding n.
func PerHour(n float64) TokenBucket { return TokenBucket{Rate: n, Period: time.Hour} }

// PerDay is a token bucket of n tokens every 24 hours, holding n.
func PerDay(n float64) TokenBucket { return TokenBucket{Rate: n, Period: Day} }

// PerWeek is a token bucket of n tokens every 7 days, holding n.
func PerWeek(n float64) TokenBucket { return TokenBucket{Rate: n, Period: Week} }

// String returns the policy in words, as in "10 per minute, capacity 3".
func (p TokenBucket) String() string {
	return describe(p.Rate, p.Period, p.Capacity) + describePrefetch(p.Prefetch)
}

func (p TokenBucket) compile() (bucket.Terms, error) {
	t, err := compile(p.Rate, p.Period, p.Capacity, p.MaxReserved, p.Shards)
	if err != nil {
		return bucket.Terms{}, err
	}
	t.Step, t.Steps, t.Phase = 1, float64(p.Period.Microseconds()), bucket.MinInstant
	if p.Prefetch == 0 {
		return t, nil
	}
	return p.prefetched(t)
}

// prefetched returns the terms of the row that tokens are taken ahead of.
func (p TokenBucket) prefetched(t bucket.Terms) (bucket.Terms, error) {
	if err := checkPrefetch(p.Prefetch, p.Shards); err != nil {
		return bucket.Terms{}, err
	}
	row, enough := bucket.RowCapacity(t.Capacity, t.Rate, t.Steps, p.Prefetch.Microseconds())
	if !enough || t.Capacity == 0 {
		return bucket.Terms{}, fmt.Errorf("its Prefetch of %v is too long beside its Capacity of %v, of which half or more arrives in that time; it must be %v or less",
			p.Prefetch, t.Capacity, time.Duration(t.Capacity/2*t.Steps/t.Rate)*time.Microsecond)
	}
	t.Capacity, t.Prefetch = row, p.Prefetch.Microseconds()
	return t, nil
}

// checkPrefetch checks what both policies ask of a Prefetch that there is.
func checkPrefetch(prefetch time.Duration, shards int) error {
	if prefetch < time.Millisecond || prefetch > time.Hour || prefetch%time.Microsecond != 0 {
		return fmt.Errorf("its Prefetch is %v; it must be whole microseconds, from 1ms to 1h, or 0 for none", prefetch)
	}
	if shards > 1 {
		return errors.New("it has Shards and a Prefetch; use one of them: with a Prefetch few calls come to the row")
	}
	return nil
}

// describePrefetch returns what a Prefetch adds to a policy in words.
func describePrefetch(prefetch time.Duration) string {
	if prefetch == 0 {
		return ""
	}
	return ", taken ahead for " + words.Span(prefetch)
}

// compile checks the numbers both policies have and returns their terms; Step, Steps and Phase are left
// to the policy.
func compile(rate float64, period time.Duration, capacity, maxReserved float64, shards int) (bucket.Terms, error) {
	if !(rate >= bucket.MinTokens && rate <= bucket.MaxTokens) {
		return bucket.Terms{}, fmt.Errorf("its Rate is %v; it must be from %g to %g tokens each Period", rate, bucket.MinTokens, bucket.MaxTokens)
	}
	if period < time.Microsecond || period > bucket.MaxSpan || period%time.Microsecond != 0 {
		return bucket.Terms{}, fmt.Errorf("its Period is %v; it must be whole microseconds, from 1µs to 100 years (write 10*time.Second, not 10)", period)
	}
	if shards < 0 || shards > bucket.MaxShards || shards&(shards-1) != 0 {
		return bucket.Terms{}, fmt.Errorf("its Shards is %d; it must be 1, 2, 4, 8, 16, 32 or %d, so that each row's part is exact", shards, bucket.MaxShards)
	}
	t := bucket.Terms{Kind: bucket.Steps{}, Rate: rate, Capacity: capacity, Reserves: maxReserved != NoReservations, Shards: int32(max(shards, 1))}
	most := min(bucket.MaxTokens, rate*(float64(bucket.MaxSpan)/float64(period))) // what arrives within MaxSpan
	switch {
	case capacity == NoCapacity:
		t.Capacity = 0
	case capacity == 0:
		t.Capacity = rate
	case !(capacity >= bucket.MinTokens && capacity <= bucket.MaxTokens):
		return bucket.Terms{}, fmt.Errorf("its Capacity is %v; it must be from %g to %g tokens, or 0 for the Rate, or NoCapacity", capacity, bucket.MinTokens, bucket.MaxTokens)
	}
	if t.Capacity > most {
		return bucket.Terms{}, fmt.Errorf("its Capacity %v takes over 100 years to fill at %s; lower it or raise the Rate", t.Capacity, words.Rate(rate, period))
	}
	switch {
	case maxReserved == NoReservations || maxReserved == NoDebt:
	case maxReserved == 0:
		t.MaxDebt = most
	case !(maxReserved >= bucket.MinTokens && maxReserved <= bucket.MaxTokens):
		return bucket.Terms{}, fmt.Errorf("its MaxReserved is %v; it must be from %g to %g tokens, or 0 for no bound, or NoDebt or NoReservations", maxReserved, bucket.MinTokens, bucket.MaxTokens)
	case maxReserved > most:
		return bucket.Terms{}, fmt.Errorf("its MaxReserved %v takes over 100 years to repay at %s; lower it or raise the Rate", maxReserved, words.Rate(rate, period))
	default:
		t.MaxDebt = maxReserved
	}
	if t.MaxDebt == 0 && t.Capacity == 0 {
		return bucket.Terms{}, errors.New("it has NoCapacity, and NoReservations or NoDebt, which admits nothing; drop one of the two")
	}
	return t, nil
}

// describe returns what both policies have in words.
func describe(rate float64, period time.Duration, capacity float64) string {
	text := words.Rate(rate, period)
	switch capacity {
	case 0, rate:
		return text
	case NoCapacity:
		return text + ", no capacity"
	}
	return text + ", capacity " + words.Number(capacity)
}
