package ratelimit

import (
	"encoding/json"
	"math"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/memory"
)

// Value is the content of a bucket at an instant, with the policy to compute it at other instants.
type Value struct {
	// Limit is the limit of the bucket.
	Limit Limit
	// Tokens is the number of tokens at AsOf. It is negative while the bucket owes reserved tokens.
	Tokens float64
	// AsOf is the time of the reading on the database's clock.
	AsOf time.Time

	held *bucket.Snapshot // nil for the zero Value
}

// At returns the tokens at another time if no more are taken, up to the capacity. Times before the bucket's last change
// count as that change. For a [Concurrency] limit it returns the free slots, if no lease is renewed or released
// meanwhile, and for the zero Value 0.
func (v Value) At(instant time.Time) float64 {
	if v.Limit.isZero() { // the zero Value, for example after an error
		return 0
	}
	return v.held.Tokens(clampInstant(instant))
}

// RetryAfter returns the time from instant until cost tokens can be taken, if no more are taken meanwhile; 0 means
// immediately. It returns ErrCostExceedsCapacity if they never can, and ErrInvalidCost for an invalid cost.
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

// Leases returns the leases on a [Concurrency] limit's slots that hadn't ended at AsOf, by ascending Fence, with only
// the fields Fence and Until. The Value in [Limiter.Acquire]'s answer knows only the new lease, and assumes that all
// other slots are held until the last lease ends.
func (v Value) Leases() (leases []Lease) {
	if v.held == nil {
		return nil
	}
	for _, h := range v.held.State.Leases() {
		if end := time.UnixMicro(h.End); end.After(v.AsOf) && h.Fence > 0 {
			leases = append(leases, Lease{Fence: h.Fence, Until: end})
		}
	}
	return leases
}

// capacity returns the maximum number of tokens of the bucket, and 0 for the zero Value.
func (v *Value) capacity() float64 {
	if v.held == nil {
		return 0
	}
	return v.held.Terms.Capacity
}

// Take returns the bucket and the decision after taking cost tokens at an instant, for simulations, tests and previews,
// without a database. If no other call changes the bucket, it decides as Limiter.Take does, to the last bit. An instant
// before the bucket's last change counts as that change, unless it's more than a minute and a window earlier: then a
// wrong clock has written the bucket, which goes on from the instant.
//
// An invalid cost, a cost above the capacity, and every cost of the zero Value are refused with a RetryAfter of 250
// years, the maximum; the method RetryAfter returns the reason as an error. A limit with Shards is one bucket here. For
// a Concurrency limit it acquires slots.
func (v Value) Take(instant time.Time, cost float64) (Value, Decision) {
	after, r := v.step(instant, cost, false)
	return after, r.Decision
}

// Reserve returns the bucket and the reservation after reserving cost tokens at an instant, without a database, so ID
// is empty. It equals Limiter.Reserve without Config.StaleAfter, to the last bit of ReadyAt.
//
// An invalid cost, one above the sum that the limit can hold and owe, and every cost of a limit with NoReservations or
// of the zero Value are refused with a RetryAfter of 250 years.
func (v Value) Reserve(instant time.Time, cost float64) (Value, Reservation) {
	return v.step(instant, cost, true)
}

// step is Reserve or Take. For Take it owes nothing and sets no ReadyAt.
func (v Value) step(instant time.Time, cost float64, reserve bool) (Value, Reservation) {
	now := clampInstant(instant)
	if v.Limit.isZero() {
		one := &single{states: [1]State{{Cost: cost, RetryAfter: longestWait}}}
		return v, Reservation{Decision: one.decision(time.UnixMicro(now))}
	}
	h := *v.held
	h.Terms = h.Terms.On(now)
	ask := bucket.Ask{Terms: h.Terms, Cost: cost}
	answer := h.Answer(now)
	d := v.Limit.definition()
	invalid := checkCost(&d, cost, math.Inf(1)) != nil || limitOwed(&ask, v.Limit, reserve) != nil ||
		checkSlots(v.Limit, cost) != nil
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

// FullValue returns the value of an unused bucket at an instant, to begin a simulation. The cost of the request does
// not matter. With Config.HashKey, fixed windows without a Start begin at other instants than here, because FullValue
// does not know the secret.
func (r Request) FullValue(instant time.Time) Value {
	if r.limit.isZero() {
		return Value{}
	}
	now := clampInstant(instant)
	ask := bucket.Ask{Terms: timesTokens(r.limit.termsFor(r.key).On(now), float64(r.limit.definition().shards))}
	answer := bucket.Answer{Now: now, State: ask.Terms.Full(now)}
	return stateOf(r.limit, &ask, &answer, &bucket.Snapshot{}).Value
}

// clampInstant returns instant in microseconds since 1970, limited to the range of a row.
func clampInstant(instant time.Time) int64 {
	switch { // UnixMicro is undefined for instants out of the range of int64
	case instant.Before(time.UnixMicro(bucket.MinInstant)):
		return bucket.MinInstant
	case instant.After(time.UnixMicro(bucket.MaxInstant)):
		return bucket.MaxInstant
	}
	return instant.UnixMicro()
}

// valueJSON is the JSON of a Value, with only the fields that a projection needs.
type valueJSON struct {
	Limit    string    `json:"limit"`
	Kind     Kind      `json:"kind"`
	Rate     float64   `json:"rate,omitempty"`
	Period   int64     `json:"period_us,omitempty"`
	Capacity float64   `json:"capacity"`
	Start    int64     `json:"start_us,omitempty"`
	Windows  []windows `json:"windows,omitempty"`
	Slices   int32     `json:"slices,omitempty"`
	Lease    int64     `json:"lease_us,omitempty"`
	Value    *float64  `json:"value,omitempty"`
	Totals   []float64 `json:"totals,omitempty"`
	Ends     []int64   `json:"ends_us,omitzero"`
	TS       int64     `json:"ts_us"`
	Now      int64     `json:"now_us"`
}

type windows struct {
	Period int64 `json:"period_us"`
	Start  int64 `json:"start_us,omitempty"`
	Until  int64 `json:"until_us,omitempty"`
}

// startOf returns the start of the first step since 1970, if a step begins at phase.
func startOf(phase, step int64) int64 { return (phase%step + step) % step }

// MarshalJSON returns the data that a client needs to compute the bucket at other instants, with the same results to
// the last bit. The JavaScript module of package middleware/httplimit/client does so. It contains no key, and no lease
// ID. The zero Value is null. For a limit with Shards it contains the sum of the rows, as one bucket.
//
//	limit                     the limit's name
//	kind                      "token bucket", "fixed window", "calendar window", "sliding window" or "concurrency"
//	rate, period_us           rate tokens are added each period, continuously or at the start of a window. For a sliding
//	                          window, rate is the maximum in any period. Concurrency has neither, and a calendar window
//	                          has no period
//	capacity                  the maximum number of tokens, or of slots
//	start_us                  0 <= start_us < a window or slice: one begins at start_us (fixed and sliding window; absent
//	                          means 0)
//	windows                   the windows from now_us on: up to until_us they are period_us long, and one begins at
//	                          start_us since 1970. The windows after the last until_us are estimated (calendar window)
//	slices, totals            all tokens ever taken: up to ts_us, and up to the end of each earlier slice, newest first. A
//	                          slice is period_us / slices long. There are up to slices + 2 totals, and tokens taken before
//	                          the last one don't count (sliding window)
//	lease_us, ends_us         the length of a lease, and the sorted ends of the leases of all slots held at ts_us
//	                          (concurrency)
//	value, ts_us              the tokens at ts_us, negative while reservations are owed. Concurrency has no value
//	now_us                    AsOf
//
// Durations and instants are whole microseconds, and instants count from 1970. Clients with float64 numbers read them
// exactly until the year 2255, when they reach 2^53. So start_us is the first window since 1970.
func (v Value) MarshalJSON() ([]byte, error) {
	if v.Limit.isZero() {
		return []byte("null"), nil
	}
	t, state := v.held.Terms, v.held.State
	out := valueJSON{
		Limit:    v.Limit.Name(),
		Kind:     kindOf(&t),
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
		out.Slices = kind.Slices
		out.Totals, out.TS = kind.Counted(t, state, out.Now)
	case bucket.Concurrent:
		out.Lease, out.Ends = kind.Lease, endsOf(state)
		out.Rate, out.Period, out.Start, out.Value = 0, 0, 0, nil
	}
	if c, is := t.Windows.(calendar); is {
		begin := t.Begin(out.Now) // leave out windows that have ended
		state.Value, out.TS = t.Kind.Tokens(t, state, max(begin, state.TS)), max(begin, state.TS)
		out.Windows, out.Period, out.Start = c.windowsFrom(out.Now), 0, 0
	}
	return json.Marshal(out)
}

// endsOf returns the sorted ends of the leases of all slots in a row.
func endsOf(s bucket.State) []int64 {
	ends := []int64{}
	for _, lease := range s.Leases() {
		ends = append(ends, slices.Repeat([]int64{lease.End}, int(min(max(lease.Slots, 0), maxSlots)))...)
	}
	slices.Sort(ends)
	return ends
}

// Simulation has a Limiter whose buckets are in memory and begin full, and whose clock you set, to replay recorded
// requests against other policies. Make it with [NewSimulation]. Use it on one goroutine at a time, so without
// KeepAlive, Hold and Maintain, which run on others. A bucket with taken tokens needs 120 to 190 bytes if its key has
// ten, until [Limiter.Prune] deletes it.
type Simulation struct {
	limiter *Limiter
	memory  memory.Pool
	at      time.Time
}

// NewSimulation returns a Simulation whose Limiter has config, but neither a Timeout nor another clock. Errors wrap
// ErrInvalidConfig.
func NewSimulation(config Config) (*Simulation, error) {
	s := &Simulation{memory: memory.NewPool(nil)}
	config.AsOf, config.Timeout = func() time.Time { return s.at }, -1
	limiter, err := New(s.memory, config)
	if err != nil {
		return nil, err
	}
	s.limiter = limiter
	return s, nil
}

// At sets the clock to a time, which can be before the previous one, and returns the Limiter:
//
//	d, err := simulation.At(noon).Take(ctx, Uploads.For("ada"))
//
// The Limiter decides as on Postgres. For a limit with Shards it begins with the first row.
func (s *Simulation) At(at time.Time) *Limiter {
	s.at = at
	return s.limiter
}

// Buckets returns the number of buckets with taken tokens. With Shards, each row counts.
func (s *Simulation) Buckets() int { return s.memory.Count() }
