package bucket

import (
	"math"
	"slices"
	"time"

	"pgregory.net/rapid"
)

// opening is when every story begins: the first instant of 2026-03-02, in microseconds since 1970.
const opening = int64(1_772_409_600_000_000)

// Spans in microseconds.
const (
	minute  = int64(60_000_000)
	day     = 24 * 60 * minute
	century = 36525 * day
)

// tokenBucket returns the terms of a token bucket: rate tokens arrive each period, up to capacity.
func tokenBucket(rate float64, period time.Duration, capacity float64) Terms {
	return Terms{Capacity: capacity, Rate: rate, Steps: float64(period.Microseconds()), Step: 1, Phase: MinInstant, Shards: 1}
}

// windows returns the terms of a fixed window, one of which begins at start.
func windows(rate float64, period time.Duration, capacity float64, start int64) Terms {
	step := period.Microseconds()
	return Terms{Capacity: capacity, Rate: rate, Steps: 1, Step: step, Phase: PhaseOf(start, step), Shards: 1}
}

// over returns t with its bucket spread over n rows.
func over(t Terms, n int32) Terms {
	t.Shards = n
	return t
}

// valid reports whether there is a policy with the terms t: nothing else gets to the algebra. That there are no other
// policies, the tests of NewLimit show.
func valid(t Terms) bool {
	bounded := func(tokens float64) bool { return tokens == 0 || tokens >= MinTokens && tokens <= MaxTokens }
	period := t.Steps * float64(t.Step)
	most := min(MaxTokens, t.Rate*(float64(MaxSpan.Microseconds())/period)) // what arrives within MaxSpan
	return t.Rate >= MinTokens && t.Rate <= MaxTokens && period <= float64(MaxSpan.Microseconds()) &&
		bounded(t.Capacity) && bounded(t.MaxDebt) && t.Capacity <= most && t.MaxDebt <= most && t.Capacity+t.MaxDebt > 0
}

// possible reports whether cost is one that t can tell from nothing, and can ever be taken so that lowest remain: no
// other is asked for.
func possible(t Terms, cost, lowest float64) bool {
	return (cost == 0 || cost >= max(t.Capacity*MinCostShare, MinTokens)) && t.Capacity-cost >= lowest
}

// period returns the length of a period in microseconds.
func period(t Terms) int64 { return int64(t.Steps) * t.Step }

func pick(t *rapid.T, n int) int { return rapid.IntRange(0, n-1).Draw(t, "pick") }

// unit draws a number from 0 to 1.
func unit(t *rapid.T) float64 { return float64(rapid.IntRange(0, 1<<20).Draw(t, "unit")) / (1 << 20) }

func one[T any](t *rapid.T, of ...T) T { return of[pick(t, len(of))] }

// everyday draws the terms of a policy as programs have them.
func everyday(t *rapid.T) Terms {
	rate := one(t, 1, 3, 5, 9, 10, 60, 70, 100, 1000, 40_000, 0.1, 1.0/3, 2.5)
	period := one(t, time.Microsecond, time.Millisecond, 16_667*time.Microsecond, 999_983*time.Microsecond,
		time.Second, 7*time.Second, time.Minute, time.Hour, 24*time.Hour, 7*24*time.Hour)
	return drawn(t, rate, period, one(t, rate, rate, rate, rate/3, rate/2, 2*rate, 7*rate, 3, 0), one(t, math.Inf(1), 0, 0, rate/2, 3, 0.2), everyday)
}

// extreme draws the terms of any policy, evenly over the orders of magnitude.
func extreme(t *rapid.T) Terms {
	between := func(low, high float64) float64 { return low * math.Pow(high/low, unit(t)) }
	period := time.Duration(between(1, float64(MaxSpan/time.Microsecond))) * time.Microsecond
	rate := between(MinTokens, MaxTokens)
	return drawn(t, rate, period,
		one(t, rate, 0, between(MinTokens, MaxTokens), MaxTokens, MinTokens),
		one(t, math.Inf(1), 0, between(MinTokens, MaxTokens), MaxTokens, MinTokens), extreme)
}

// dyadic draws the terms of a policy with which no sum, product or quotient rounds, as long as costs are multiples of
// 2^-10: the rate of a bucket is a power of two per microsecond.
func dyadic(t *rapid.T) Terms {
	power := func(low, high int) float64 { return math.Ldexp(1, low+pick(t, high-low+1)) }
	period := time.Duration(power(10, 20)) * time.Microsecond
	rate := power(0, 6)
	return drawn(t, rate, period, one(t, rate, power(0, 12), 3*power(-3, 10), 0), one(t, math.Inf(1), 0, power(-10, 12)), dyadic)
}

// drawn returns the terms of a policy of either kind with those numbers, or draws again when there is none. An infinite
// debt is the largest there is.
func drawn(t *rapid.T, rate float64, period time.Duration, capacity, debt float64, again func(*rapid.T) Terms) Terms {
	terms := tokenBucket(rate, period, capacity)
	if pick(t, 3) == 0 {
		start := one(t, int64(unit(t)*float64(period.Microseconds())), opening, opening+period.Microseconds()/3, opening+int64(unit(t)*float64(century)))
		terms = windows(rate, period, capacity, start)
	}
	if terms.MaxDebt = debt; math.IsInf(debt, 1) {
		terms.MaxDebt = min(MaxTokens, rate*(float64(MaxSpan)/float64(period)))
	}
	if !valid(terms) {
		return again(t)
	}
	return terms
}

// rowsOf draws rows as they may be found of a bucket that is spread over several, and a time.
func rowsOf(t *rapid.T, terms Terms) (rows []State, now int64) {
	shard := terms.OfShard()
	now = opening + int64(unit(t)*float64(century))
	rows = make([]State, terms.Shards)
	for i := range rows {
		rows[i] = State{
			Value: one(t, 0, shard.Capacity, shard.Capacity*unit(t), shard.Capacity*unit(t), -shard.MaxDebt, -shard.MaxDebt*unit(t)),
			TS:    now - int64(unit(t)*2*float64(period(terms))/max(terms.Rate, 1)) + one(t, 0, 0, 0, minute, 2*minute+period(terms)),
		}
	}
	return rows, now
}

// evenly returns the rows of a bucket that hold and gain as much as row does.
func evenly(row State, n int32) []State {
	return slices.Repeat([]State{{Value: row.Value / float64(n), TS: row.TS}}, int(n))
}
