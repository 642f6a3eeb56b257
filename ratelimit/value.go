package ratelimit

import (
	"encoding/json"
	"math"
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

	held *bucket.Content // nil for the zero Value
}

// At returns what the bucket holds at another instant if nothing more is taken: never above the
// capacity. Instants before the last change of the bucket count as that change. Of a [Concurrency] limit it is the slots that
// are free then, as leases end, if none is renewed or given back.
func (v Value) At(instant time.Time) float64 {
	if v.Limit.isZero() { // the zero Value, as after an error
		return 0
	}
	return v.held.Tokens(clampInstant(instant))
}

// RetryAfter returns how long from instant it takes until cost tokens can be taken, if nothing more
// is taken meanwhile: 0 when they can be at once. It returns ErrCostExceedsCapacity when they never can.
func (v Value) RetryAfter(instant time.Time, cost float64) (time.Duration, error) {
	d := v.Limit.definition()
	if err := checkCost(&d, cost, v.capacity()); err != nil {
		return 0, err
	}
	if err := checkSlots(v.Limit, cost); err != nil {
		return 0, err
	}
	return v.held.Wait(clampInstant(instant), cost), nil
}

// capacity returns the most tokens that the bucket holds, and 0 for the zero Value.
func (v *Value) capacity() float64 {
	if v.held == nil {
		return 0
	}
	return v.held.Terms.Capacity
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
// Of a [Concurrency] limit it acquires slots, which are whole.
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
	if v.Limit.isZero() {
		one := &single{states: [1]State{{Cost: cost, RetryAfter: longestWait}}}
		return v, Reservation{Decision: one.decision(time.UnixMicro(now))}
	}
	h := *v.held
	h.Terms = h.Terms.On(now)
	ask := bucket.Ask{Terms: h.Terms, Cost: cost}
	answer := h.Answer(&ask, now)
	d := v.Limit.definition()
	invalid := checkCost(&d, cost, math.Inf(1)) != nil || limitDebt(&ask, v.Limit, reserve) != nil || checkSlots(v.Limit, cost) != nil
	if !invalid {
		answer = ask.Decide(answer)
	}
	one := &single{}
	s := &one.states[0]
	setState(s, v.Limit, &ask, &answer, &one.held[0])
	if invalid {
		s.RetryAfter = longestWait
	}
	r := Reservation{Decision: one.decision(s.Value.AsOf)}
	if reserve && r.Allowed {
		r.ReadyAt = r.At.Add(ask.ReadyAfter(answer))
	}
	return s.Value, r
}

// Full returns the value, at an instant, of a bucket that nobody has used: the first one of a simulation. The request's
// cost does not matter. With Config.HashKey, fixed windows without a Start begin at other instants than here, where no
// secret is known.
func (r Request) Full(instant time.Time) Value {
	if r.limit.isZero() {
		return Value{}
	}
	now := clampInstant(instant)
	ask := bucket.Ask{Terms: r.limit.termsFor(r.key).On(now)}
	answer := bucket.Answer{Now: now, State: ask.Terms.Full(now)}
	if ask.Sharded() {
		shard := ask.Terms.OfShard()
		answer.SetRows(&ask, slices.Repeat([]bucket.State{shard.Full(now)}, int(ask.Terms.Shards)))
	}
	return stateOf(r.limit, &ask, &answer, &bucket.Content{}).Value
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
	Limit     string    `json:"limit"`
	Algorithm string    `json:"algorithm"`
	Rate      float64   `json:"rate,omitempty"`
	Period    int64     `json:"period_us,omitempty"`
	Capacity  float64   `json:"capacity"`
	Start     int64     `json:"start_us,omitempty"`
	Windows   []windows `json:"windows,omitempty"`
	Slices    int32     `json:"slices,omitempty"`
	Lease     int64     `json:"lease_us,omitempty"`
	Value     *float64  `json:"value,omitempty"`
	Totals    []float64 `json:"totals,omitempty"`
	Ends      []int64   `json:"ends_us,omitzero"`
	TS        int64     `json:"ts_us"`
	Now       int64     `json:"now_us"`
}

// windows are those of a calendar that follow each other and are of one length.
type windows struct {
	Period int64 `json:"period_us"`
	Start  int64 `json:"start_us,omitempty"`
	Until  int64 `json:"until_us,omitempty"`
}

// windowsOf returns the windows as MarshalJSON tells them.
func windowsOf(runs []bucket.Run) []windows {
	all := make([]windows, len(runs))
	for i, r := range runs {
		all[i] = windows{Period: r.Step, Start: startOf(r.From, r.Step), Until: r.Until}
	}
	all[len(all)-1].Until = 0
	return all
}

// startOf returns the first instant since 1970 at which a step begins, if one begins at phase.
func startOf(phase, step int64) int64 { return (phase%step + step) % step }

// MarshalJSON returns the bucket as a client needs it to project it with the same answers to the last bit,
// which the JavaScript module of package httplimit/client does. No key is in it, and no lease by which it could be
// released. The zero Value is null. Of a limit with Shards it holds the sum of the rows, and a projection of that is right
// only while the rows are level.
//
//	limit                     the limit's name
//	algorithm                 "token bucket", "fixed window", "calendar window", "sliding window" or "concurrency"
//	rate, period_us           rate tokens arrive each period, continuously or when a window begins; of a sliding window
//	                          the most in any period. None for concurrency, and a calendar window has no period
//	capacity                  the most tokens, or slots, that it holds
//	start_us                  0 <= start_us < a window, or a slice: one begins there (fixed and sliding window; absent is 0)
//	windows                   when windows begin from ts_us on: those up to until_us are period_us long, and one begins at start_us
//	                          since 1970; those after the last until_us are estimated (calendar window)
//	slices, totals            what was ever taken: up to ts_us, and up to the ends of the slices before that of ts_us, the newest
//	                          first. Each is period_us / slices long, and before the last of up to slices + 2 totals nothing was
//	                          taken that counts (sliding window)
//	lease_us, ends_us         how long a lease is, and when that of each slot that was held at ts_us ends, in order
//	                          (concurrency)
//	value, ts_us              value tokens were held at ts_us, negative while reservations are owed. No value for concurrency
//	now_us                    AsOf
//
// Spans and instants are whole microseconds, instants since 1970. A client whose numbers are float64 has
// them exactly until the year 2255, when they reach 2^53; that is why start_us is the first window since
// 1970, and not the far earlier one that the statements count from.
func (v Value) MarshalJSON() ([]byte, error) {
	if v.Limit.isZero() {
		return []byte("null"), nil
	}
	t, state := v.held.Terms, v.held.State
	out := valueJSON{
		Limit:    v.Limit.Name(),
		Rate:     t.Rate,
		Period:   t.Step * int64(t.Steps),
		Capacity: t.Capacity,
		Start:    startOf(t.Phase, t.Step),
		Value:    &state.Value,
		TS:       state.TS,
		Now:      v.AsOf.UnixMicro(),
	}
	switch kind := t.Kind.(type) {
	case bucket.Sliding:
		out.Algorithm, out.Slices = "sliding window", kind.Slices
		out.Totals, out.TS = kind.Counted(t, state, out.Now)
	case bucket.Concurrent:
		out.Algorithm, out.Lease, out.Ends = "concurrency", kind.Lease, endsOf(state)
		out.Rate, out.Period, out.Start, out.Value = 0, 0, 0, nil
	case bucket.Calendar:
		runs := kind.Runs(t, state.TS, out.Now)
		if from := runs[0].From; state.TS < from { // windows that are over are not told
			state.Value, out.TS = kind.Tokens(t, state, from), from
		}
		out.Algorithm, out.Windows = "calendar window", windowsOf(runs)
		out.Period, out.Start = 0, 0
	default:
		out.Algorithm = "token bucket"
		if t.Step > 1 { // windows of a microsecond are a token bucket
			out.Algorithm = "fixed window"
		}
	}
	return json.Marshal(out)
}

// endsOf returns when the lease of each slot ends that a row has.
func endsOf(s bucket.State) []int64 {
	ends := []int64{}
	for _, lease := range s.Leases() {
		ends = append(ends, slices.Repeat([]int64{lease.End}, int(min(max(lease.Slots, 0), maxSlots)))...)
	}
	slices.Sort(ends)
	return ends
}
