package ratelimit

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/strictjson"
	"github.com/pgratelimit/pgratelimit/internal/words"
)

// Durations that package time does not name.
const (
	Day  = 24 * time.Hour
	Week = 7 * Day
)

const (
	// None means no tokens, because 0 means the default. As Capacity it stores none, so every request must be reserved and
	// waits its turn, which spaces requests as evenly as their costs allow; Take returns ErrCostExceedsCapacity for any
	// cost above 0. As MaxReserved it limits Reserve to the available tokens, which unlike Take's can be settled and
	// cancelled.
	None = -math.MaxFloat64 / 2

	// NoReservations as MaxReserved forbids reservations.
	NoReservations = -math.MaxFloat64
)

// TokenBucket adds tokens continuously: Rate tokens each Period, up to Capacity.
//
//	tokens = min(Capacity, value + elapsed * Rate / Period)
//
// In any span t, at most Capacity + Rate * t / Period tokens are taken. The algorithm is the continuous-state leaky
// bucket of ITU-T I.371, but it counts the tokens left.
type TokenBucket struct {
	// Rate is the number of tokens added each Period: from 1e-9 to 1e12.
	Rate float64
	// Period is the time in which Rate tokens are added: whole microseconds, up to 100 years.
	Period time.Duration
	// Capacity is the maximum number of tokens in the bucket, and so the largest cost that Take accepts. Other libraries
	// call it burst. Defaults to Rate. None stores no tokens.
	Capacity float64
	// MaxReserved is the most tokens that reservations can owe. Defaults to 1e12 tokens, or to the tokens that refill in
	// 100 years if they are fewer. None reserves only available tokens, and NoReservations forbids reservations.
	MaxReserved float64
	// Shards splits each bucket into rows, each with an equal part of its capacity and rate: a power of two up to 64.
	// Defaults to 1. Transactions that take from one row wait for each other, and at SERIALIZABLE run again. With n rows
	// only those on the same row conflict, so about n times as many succeed if they are long or come from many processes.
	//
	// The rows together never give more than the bucket may, but a call can be refused although they have enough together:
	// see docs/promises.md. In an allowed decision the tokens left are an estimate. Keep usual costs well below Capacity /
	// Shards, because Reserve, Credit, Reset and a Take of more than that lock all rows. Two transactions that take from
	// the bucket, and then lock all of its rows, can deadlock; InTx then runs one of them again.
	//
	// With another number of Shards a bucket starts full, in other rows. A rule can change Shards only with ResetTokens.
	Shards int
}

// PerSecond returns a token bucket with a rate of n tokens per second and a capacity of n.
func PerSecond(n float64) TokenBucket { return TokenBucket{Rate: n, Period: time.Second} }

// PerMinute returns a token bucket with a rate of n tokens per minute and a capacity of n.
func PerMinute(n float64) TokenBucket { return TokenBucket{Rate: n, Period: time.Minute} }

// PerHour returns a token bucket with a rate of n tokens per hour and a capacity of n.
func PerHour(n float64) TokenBucket { return TokenBucket{Rate: n, Period: time.Hour} }

// PerDay returns a token bucket with a rate of n tokens per 24 hours and a capacity of n.
func PerDay(n float64) TokenBucket { return TokenBucket{Rate: n, Period: Day} }

// PerWeek returns a token bucket with a rate of n tokens per 7 days and a capacity of n.
func PerWeek(n float64) TokenBucket { return TokenBucket{Rate: n, Period: Week} }

// String returns the policy as text, such as "10 per minute, capacity 3".
func (p TokenBucket) String() string {
	return describe(p.Rate, p.Period, p.Capacity) + describeRest(p.MaxReserved, p.Shards)
}

func (p TokenBucket) compile() (bucket.Terms, error) {
	t, err := compile(p.Rate, p.Period, p.Capacity, p.MaxReserved, p.Shards)
	if err != nil {
		return bucket.Terms{}, err
	}
	t.Step, t.Steps, t.Phase = 1, float64(p.Period.Microseconds()), bucket.MinInstant
	return t, nil
}

// describeRest returns the text of the other fields of a policy, if they are not the default.
func describeRest(maxReserved float64, shards int) (text string) {
	switch maxReserved {
	case 0:
	case None:
		text = ", no debt"
	case NoReservations:
		text = ", no reservations"
	default:
		text = ", up to " + words.Number(maxReserved) + " owed"
	}
	if shards > 1 {
		text += fmt.Sprintf(", %d shards", shards)
	}
	return text
}

// compile checks the numbers that all policies share and returns the terms of each row. The caller sets Step, Steps and
// Phase.
func compile(rate float64, period time.Duration, capacity, maxReserved float64, shards int) (bucket.Terms, error) {
	if rate == 0 {
		return bucket.Terms{}, fmt.Errorf("its Rate is 0; it must be from %g to %g tokens each Period; to refuse every "+
			"request, pause the limit", bucket.MinTokens, bucket.MaxTokens)
	}
	if !(rate >= bucket.MinTokens && rate <= bucket.MaxTokens) {
		return bucket.Terms{}, fmt.Errorf("its Rate is %v; it must be from %g to %g tokens each Period", rate,
			bucket.MinTokens, bucket.MaxTokens)
	}
	if period < time.Microsecond || period > bucket.MaxSpan || period%time.Microsecond != 0 {
		return bucket.Terms{}, fmt.Errorf("its Period is %v; it must be whole microseconds, from 1µs to 100 years (write "+
			"10*time.Second, not 10)", period)
	}
	if shards < 0 || shards > maxShards || shards&(shards-1) != 0 {
		return bucket.Terms{}, fmt.Errorf("its Shards is %d; it must be 1, 2, 4, 8, 16, 32 or %d, so that each row's part "+
			"is exact", shards, maxShards)
	}
	t := bucket.Terms{Kind: bucket.Steps{}, Rate: rate, Capacity: capacity, Reserves: maxReserved != NoReservations}
	most := min(bucket.MaxTokens, rate*(float64(bucket.MaxSpan)/float64(period))) // the tokens added within MaxSpan
	switch {
	case capacity == None:
		t.Capacity = 0
	case capacity == 0:
		t.Capacity = rate
	case !(capacity >= bucket.MinTokens && capacity <= bucket.MaxTokens):
		return bucket.Terms{}, fmt.Errorf("its Capacity is %v; it must be from %g to %g tokens, or 0 for the Rate, or None",
			capacity, bucket.MinTokens, bucket.MaxTokens)
	}
	if t.Capacity > most {
		return bucket.Terms{}, fmt.Errorf("its Capacity %v takes over 100 years to fill at %s; lower it or raise the Rate",
			t.Capacity, words.Rate(rate, period))
	}
	switch {
	case maxReserved == NoReservations || maxReserved == None:
	case maxReserved == 0:
		t.MaxDebt = most
	case !(maxReserved >= bucket.MinTokens && maxReserved <= bucket.MaxTokens):
		return bucket.Terms{}, fmt.Errorf("its MaxReserved is %v; it must be from %g to %g tokens, or 0 for no bound, or "+
			"None or NoReservations", maxReserved, bucket.MinTokens, bucket.MaxTokens)
	case maxReserved > most:
		return bucket.Terms{},
			fmt.Errorf("its MaxReserved %v takes over 100 years to repay at %s; lower it or raise the Rate", maxReserved,
				words.Rate(rate, period))
	default:
		t.MaxDebt = maxReserved
	}
	if t.MaxDebt == 0 && t.Capacity == 0 {
		return bucket.Terms{}, errors.New("its Capacity is None, and its MaxReserved None or NoReservations, which admits " +
			"nothing; drop one of the two")
	}
	return timesTokens(t, 1/float64(max(shards, 1))), nil
}

func describe(rate float64, period time.Duration, capacity float64) string {
	text := words.Rate(rate, period)
	switch capacity {
	case 0, rate:
		return text
	case None:
		return text + ", no capacity"
	}
	return text + ", capacity " + words.Number(capacity)
}

type bucketText struct {
	Kind        Kind     `json:"kind"`
	Rate        float64  `json:"rate"`
	Period      span     `json:"period"`
	Capacity    *amount  `json:"capacity,omitempty"`
	MaxReserved *maxDebt `json:"max_reserved,omitempty"`
	Shards      int      `json:"shards,omitempty"`
}

func (p TokenBucket) text() policyText {
	return &bucketText{
		KindTokenBucket, p.Rate, span(p.Period), amountOf(p.Capacity, p.Rate), owedOf(p.MaxReserved), without(p.Shards, 1),
	}
}

func (t *bucketText) policy() (Policy, error) {
	if t.Rate != 0 && t.Period == 0 {
		return nil, strictjson.Errorf("period", "is missing; write the time in which rate tokens refill, such as 1m")
	}
	return TokenBucket{
		Rate: t.Rate, Period: time.Duration(t.Period), Capacity: t.Capacity.tokens(), MaxReserved: t.MaxReserved.tokens(),
		Shards: t.Shards,
	}, nil
}

func (p TokenBucket) scaled(times float64) Policy {
	scaleSteps(times, &p.Rate, &p.Capacity, &p.MaxReserved)
	return p
}
