package ratelimit

import (
	"encoding/json"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Value is what a bucket's row holds, with the policy to project it.
type Value struct {
	// Limit is the limit the bucket belongs to.
	Limit Limit
	// Tokens is what the bucket holds at AsOf: negative while reservations are owed.
	Tokens float64
	// AsOf is the instant of the reading on the database's clock.
	AsOf time.Time

	terms bucket.Terms
	state bucket.State
	rows  []bucket.State // of each row, when the bucket is spread over several
}

// At returns what the bucket holds at another instant if nothing more is taken: never above the
// capacity. Instants before the last change of the bucket count as that change.
func (v Value) At(instant time.Time) float64 {
	if v.Limit.policy == nil { // the zero Value, as after an error
		return 0
	}
	return v.tokens(clampInstant(instant))
}

// tokens is Terms.Tokens for what the bucket holds.
func (v *Value) tokens(now int64) float64 {
	if v.rows != nil {
		return v.terms.TokensOf(v.rows, now)
	}
	return v.terms.Tokens(v.state, now)
}

// RetryAfter returns how long from instant it takes until cost tokens can be taken, if nothing more
// is taken meanwhile: 0 when they can be at once. It returns ErrCostExceedsCapacity when they never can.
func (v Value) RetryAfter(instant time.Time, cost float64) (time.Duration, error) {
	if err := checkCost(&v.Limit, cost, v.terms.Capacity); err != nil {
		return 0, err
	}
	return v.wait(clampInstant(instant), cost, 0), nil
}

// wait is Terms.Wait for what the bucket holds.
func (v *Value) wait(now int64, cost, lowest float64) time.Duration {
	if v.rows != nil {
		return v.terms.WaitOf(v.rows, now, cost, lowest)
	}
	return v.terms.Wait(v.state, now, cost, lowest)
}

// Take returns what the bucket would hold, and what a call would be told, if cost tokens were taken at an instant: the
// step of the algebra without a database, for simulations, tests and previews. The decisions are those of Limiter.Take
// to the last bit, when nobody else changes the bucket in between; nothing is stored. A refusal leaves the tokens as
// they are. An instant before the last change of the bucket counts as that change, unless it is more than a minute and a
// window before: the bucket is then taken to be from a clock that was wrong, and goes on from the instant.
//
// A cost that is no number of tokens, or more than the limit can ever give, is refused with a RetryAfter of 250 years,
// the longest there is; so is every cost of the zero Value. RetryAfter, the method, says with an error what is wrong.
// Of a limit with Shards it takes from all rows together, as a call does that finds too few tokens in the one it tries.
func (v Value) Take(instant time.Time, cost float64) (Value, Decision) {
	after, r := v.step(instant, cost, false)
	return after, r.Decision
}

// Reserve returns what the bucket would hold, and what a call would be told, if cost tokens were reserved at an instant. It
// is to Limiter.Reserve what the method Take is to Limiter.Take, to the last bit of ReadyAt, for a Limiter that gives
// reservations no time to become stale in. Nothing is kept to be settled, so ID is empty.
//
// A cost that is no number of tokens, or more than the limit can ever give and owe, is refused with a RetryAfter of 250
// years; so is every cost of a limit with NoReservations, and of the zero Value.
func (v Value) Reserve(instant time.Time, cost float64) (Value, Reservation) {
	return v.step(instant, cost, true)
}

// step is Reserve, or else Take, which owes nothing and names no ReadyAt.
func (v Value) step(instant time.Time, cost float64, reserve bool) (Value, Reservation) {
	now := clampInstant(instant)
	if v.Limit.policy == nil {
		return v, Reservation{Decision: State{Cost: cost, RetryAfter: longestWait}.asDecision(time.UnixMicro(now))}
	}
	ask, answer := v.ask(cost), v.answer(now)
	invalid := limitDebt(&ask, &v.Limit, reserve) != nil
	switch {
	case invalid:
	case cost == 0: // which writes nothing
		answer.Allowed = v.tokens(now) >= ask.Lowest
	case answer.Rows != nil:
		answer.Allowed = v.terms.TakeRows(answer.Rows, now, cost, ask.Lowest)
	default:
		answer.State, answer.Allowed = v.terms.Take(answer.State, now, cost, ask.Lowest)
	}
	if answer.Rows != nil {
		answer.SetRows(&ask, answer.Rows) // each row has grown by itself, whatever was decided
	}
	s := stateOf(&v.Limit, &ask, &answer)
	if invalid {
		s.RetryAfter = longestWait
	}
	r := Reservation{Decision: s.asDecision(s.Value.AsOf)}
	if reserve && r.Allowed {
		r.ReadyAt = r.At.Add(ask.ReadyAfter(answer))
	}
	return s.Value, r
}

// Full returns the value, at an instant, of a bucket that nobody has used: the first one of a simulation. The request's
// cost does not matter. With Config.HashKey, fixed windows without a Start begin at other instants than here, where no
// secret is known.
func (r Request) Full(instant time.Time) Value {
	if r.limit.policy == nil {
		return Value{}
	}
	now := clampInstant(instant)
	ask := bucket.Ask{Terms: r.limit.termsFor(r.key)}
	answer := bucket.Answer{Now: now, State: ask.Terms.Full(now)}
	if ask.Sharded() {
		shard := ask.Terms.OfShard()
		answer.SetRows(&ask, slices.Repeat([]bucket.State{shard.Full(now)}, int(ask.Terms.Shards)))
	}
	return stateOf(&r.limit, &ask, &answer).Value
}

// ask returns a request for cost tokens of the value's bucket.
func (v *Value) ask(cost float64) bucket.Ask { return bucket.Ask{Terms: v.terms, Cost: cost} }

// answer returns what a call at now would find in the bucket, with a wrong clock in it put right.
func (v *Value) answer(now int64) bucket.Answer {
	a := bucket.Answer{Now: now, State: v.terms.FixClock(v.state, now)}
	if v.rows != nil {
		a.Rows = v.terms.FixClocks(v.rows, now)
	}
	return a
}

// clampInstant returns instant in microseconds since 1970, no further out than a row can hold.
func clampInstant(instant time.Time) int64 {
	switch { // before UnixMicro, which is undefined for instants that microseconds cannot count
	case instant.Before(time.UnixMicro(bucket.MinInstant)):
		return bucket.MinInstant
	case instant.After(time.UnixMicro(bucket.MaxInstant)):
		return bucket.MaxInstant
	}
	return instant.UnixMicro()
}

// valueJSON is what projecting a Value takes, and nothing else.
type valueJSON struct {
	Limit     string  `json:"limit"`
	Algorithm string  `json:"algorithm"`
	Rate      float64 `json:"rate"`
	Period    int64   `json:"period_us"`
	Capacity  float64 `json:"capacity"`
	Start     int64   `json:"start_us,omitempty"`
	Value     float64 `json:"value"`
	TS        int64   `json:"ts_us"`
	Now       int64   `json:"now_us"`
}

// MarshalJSON returns the bucket as a client needs it to project it with the same answers to the last bit,
// which the JavaScript module of package httplimit/client does. No key is in it. The zero Value is null. Of a limit
// with Shards it holds the sum of the rows, and a projection of that is right only while the rows are level.
//
//	limit                     the limit's name
//	algorithm                 "token bucket" or "fixed window"
//	rate, period_us           rate tokens arrive each period, continuously or when a window begins
//	capacity                  the most it holds
//	start_us                  0 <= start_us < period_us: a window begins there (fixed window; absent is 0)
//	value, ts_us              value tokens were held at ts_us, negative while reservations are owed
//	now_us                    AsOf
//
// Spans and instants are whole microseconds, instants since 1970. A client whose numbers are float64 has
// them exactly until the year 2255, when they reach 2^53; that is why start_us is the first window since
// 1970, and not the far earlier one that the statements count from.
func (v Value) MarshalJSON() ([]byte, error) {
	if v.Limit.policy == nil {
		return []byte("null"), nil
	}
	t := v.terms
	out := valueJSON{
		Limit:     v.Limit.name,
		Algorithm: "token bucket",
		Rate:      t.Rate,
		Period:    t.Step * int64(t.Steps),
		Capacity:  t.Capacity,
		Value:     v.state.Value,
		TS:        v.state.TS,
		Now:       v.AsOf.UnixMicro(),
	}
	if t.Step > 1 { // windows of a microsecond are a token bucket
		out.Algorithm = "fixed window"
		out.Start = (t.Phase%t.Step + t.Step) % t.Step
	}
	return json.Marshal(out)
}
