// Package reserved keeps reservations, which are records of tokens that were taken for work that is done later. It has
// their rows, and their life from open to settled, cancelled or expired.
package reserved

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"math"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/store"
)

// The states of a reservation, as its row has them.
const (
	Open      = "open"
	Settled   = "settled"
	Cancelled = "cancelled"
	Expired   = "expired"
)

// Keeping says how long a new reservation is kept, and how it expires.
type Keeping struct {
	StaleAfter  time.Duration // after it is ready; 0: never
	ExpireAfter time.Duration // after it is ready
	Release     bool          // whether its tokens are returned when it expires

	NotBefore int64    // the instant before which it is not ready
	Plans     []string // of each bucket's key; empty if no key is on a plan
}

// Reservation is a row of the reservations table.
type Reservation struct {
	ID        string
	State     string
	ReadyUs   int64
	StaleUs   *int64
	StartedUs *int64
	ExpiresUs int64
	Release   bool
	Buckets   []Reserved // in the order of locking

	NowUs       int64 // when it was locked
	PausedUntil int64 // the end of the latest pause of its limits, as far as this process knows

	known  *store.Known    // what was read; nil: it's new
	others json.RawMessage // as it was read
}

// Reserved is a bucket that a reservation took from, and the terms under which it did. The fields have the names of the
// columns.
type Reserved struct {
	bucket.Key
	Plan     string  `json:"plan,omitzero"` // of the key
	Cost     float64 `json:"cost"`
	Capacity float64 `json:"capacity"`
	Rate     float64 `json:"rate"`
	Steps    float64 `json:"steps"`
	Lowest   float64 `json:"lowest"`
	StepUs   int64   `json:"step_us"`
	PhaseUs  int64   `json:"phase_us"`
	Calendar string  `json:"calendar,omitzero"` // the stored form of the Windows
	PaidUs   int64   `json:"paid_us"`           // from then on the bucket owes nothing for the reservation

	// Owed is what the bucket owed after the reservation took from it, for the reservation and for those before it.
	Owed float64 `json:"owed,omitzero"`
	// Settled is what the work cost in the end; nil: the reservation was not settled.
	Settled *float64 `json:"settled,omitempty"`

	Now bucket.Terms `json:"-"` // of the limit, as far as this process knows
}

// Record returns the reservation of the tokens taken.
func (k *Keeping) Record(asks []bucket.Ask, answers []bucket.Answer) store.Record {
	paid, owed, ready := ReadyAt(asks, answers, k.NotBefore)
	r := &Reservation{
		ID: newID(), State: Open, ReadyUs: ready, ExpiresUs: ready + k.ExpireAfter.Microseconds(),
		Release: k.Release,
	}
	if k.StaleAfter > 0 {
		stale := ready + k.StaleAfter.Microseconds()
		r.StaleUs = &stale
	}
	r.Buckets = make([]Reserved, len(asks))
	for i := range asks {
		a, b := &asks[i], &r.Buckets[i]
		*b = Reserved{Key: a.Key, Cost: a.Cost, PaidUs: paid[i], Owed: owed[i]}
		b.setTerms(&a.Terms)
		b.Lowest = a.MinBalance
		if i < len(k.Plans) {
			b.Plan = k.Plans[i]
		}
	}
	return r
}

// Row implements store.Recorder.
func (k *Keeping) Row() store.Row {
	row := store.Row{
		ID: newID(), Plans: k.Plans, NotBeforeUs: k.NotBefore, ExpireUs: k.ExpireAfter.Microseconds(),
		Release: k.Release,
	}
	if k.StaleAfter > 0 {
		row.StaleUs = new(k.StaleAfter.Microseconds())
	}
	return row
}

// Made implements store.Recorder. The reservation has no buckets.
func (*Keeping) Made(row store.Row, readyUs int64) store.Record {
	r := &Reservation{ID: row.ID, State: Open, ReadyUs: readyUs}
	if row.StaleUs != nil {
		r.StaleUs = new(readyUs + *row.StaleUs)
	}
	return r
}

// NewReserved returns a bucket of a reservation that took cost under terms.
func NewReserved(key bucket.Key, plan string, cost float64, t *bucket.Terms) Reserved {
	b := Reserved{Key: key, Plan: plan, Cost: cost}
	b.setTerms(t)
	return b
}

func (b *Reserved) setTerms(t *bucket.Terms) {
	b.Capacity, b.Rate, b.Steps, b.Lowest = t.Capacity, t.Rate, t.Steps, -t.MaxDebt
	b.StepUs, b.PhaseUs, b.Calendar = t.Step, t.Phase, ""
	if t.Windows != nil {
		b.Calendar = t.Windows.String()
	}
}

// Terms returns the terms under which the bucket was taken from, without their Windows.
func (b *Reserved) Terms() bucket.Terms {
	return bucket.Terms{
		Kind: bucket.Steps{}, Capacity: b.Capacity, Rate: b.Rate, Steps: b.Steps, Step: b.StepUs, Phase: b.PhaseUs,
		MaxDebt: -b.Lowest, Reserves: true,
	}
}

// ReadyAt returns the instant from which each bucket owes nothing any more, and what it owes. ready is the latest of
// the instants of enforced limits and of notBefore.
func ReadyAt(asks []bucket.Ask, answers []bucket.Answer, notBefore int64) (paid []int64, owed []float64, ready int64) {
	ready = max(answers[0].Now, notBefore)
	for i := range asks {
		paid = append(paid, answers[0].Now+asks[i].ReadyAfter(answers[i]).Microseconds())
		owed = append(owed, max(0, -asks[i].Tell(&answers[i], 0, &bucket.Snapshot{}).Tokens))
		if !asks[i].Unenforced {
			ready = max(ready, paid[i])
		}
	}
	return paid, owed, ready
}

func newID() string {
	var b [16]byte
	rand.Read(b[:]) // never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	h := hex.EncodeToString(b[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// Asks returns the asks of the reservation, under the terms that its limits have now, to take or charge its tokens
// again. Returned tokens were in the bucket before, so a credit may fill a bucket up to the capacity of then or of now.
// If the terms of now are of another plan than the key's, its capacity loses no tokens.
func (r *Reservation) Asks() []bucket.Ask {
	asks := make([]bucket.Ask, len(r.Buckets))
	for i := range asks {
		b := &r.Buckets[i]
		asks[i] = bucket.Ask{
			Key: b.Key, Terms: b.Now, Cost: b.Cost, MinBalance: -b.Now.MaxDebt, AllowDebt: true, CreditCap: b.Capacity,
		}
	}
	return asks
}

// Charge returns the charge of amounts to the reservation's buckets. A bucket gives back to the step in which it had
// paid, and what it had paid in that step.
func (r *Reservation) Charge(amounts []float64) store.Charge {
	c := store.Charge{Asks: r.Asks(), Amounts: slices.Clone(amounts), Taken: make([]int64, len(amounts))}
	for i := range c.Taken {
		b := &r.Buckets[i]
		c.Taken[i] = b.PaidUs
		c.Amounts[i] = max(amounts[i], -b.paidSince(r.NowUs))
	}
	return c
}

// paidSince returns how many tokens more the bucket would have at an instant without the reservation, by the terms
// under which it was taken from. Each window pays what was owed with its own tokens, oldest first, and fills the bucket
// no further than its capacity:
//
//	Owed      = paid in windows 1 to n, of which the n-th begins at PaidUs
//	paidSince = max(0, min(Cost, Capacity - (k * tokens of a window - Owed))) in window k
func (b *Reserved) paidSince(now int64) float64 {
	t := b.Terms()
	if b.Owed == 0 || t.Step <= 1 || b.Now.Step <= 1 { // tokens of a token bucket, before or now, belong to no window
		return b.Cost
	}
	each := t.Rate / t.Steps
	windows := math.Ceil(b.Owed / each)
	// The windows left begin after the window of now. If their lengths differ, the reservation reached into only one.
	left := math.Ceil(float64(b.PaidUs-now) / float64(t.Step))
	if left >= windows {
		return b.Cost // none of them has begun
	}
	return max(0, min(b.Cost, t.Capacity+b.Owed-float64((windows-max(left, 0))*each)))
}

// reopen moves a reservation whose costs were taken again, under the terms that its limits have now, to the instant at
// which it is ready. Its buckets owe nothing from the instants paid on.
func (r *Reservation) reopen(paid []int64, owed []float64, ready int64) {
	if r.StaleUs != nil {
		stale := ready + (*r.StaleUs - r.ReadyUs)
		r.StaleUs = &stale
	}
	r.ExpiresUs += ready - r.ReadyUs
	r.State, r.ReadyUs, r.StartedUs, r.known = Open, ready, nil, nil // to be saved, also if it keeps its slot
	for i := range r.Buckets {
		b := &r.Buckets[i]
		b.PaidUs, b.Owed, b.Settled = paid[i], owed[i], nil
		b.setTerms(&b.Now)
	}
}

// settle notes what the buckets cost in the end, unless that is known: amounts more than reserved.
func (r *Reservation) settle(amounts []float64) {
	for i := range r.Buckets {
		if b := &r.Buckets[i]; b.Settled == nil {
			b.Settled = new(b.Cost + amounts[i])
		}
	}
}

// Of returns the places of the buckets that have the key, with any Shard.
func (r *Reservation) Of(k bucket.Key) (places []int) {
	for i := range r.Buckets {
		if r.Buckets[i].Whole() == k {
			places = append(places, i)
		}
	}
	return places
}

// Credit returns the amounts that give back all the reservation took.
func (r *Reservation) Credit() []float64 {
	amounts := make([]float64, len(r.Buckets))
	for i := range amounts {
		amounts[i] = -r.Buckets[i].Cost
	}
	return amounts
}

// Released returns the amounts that the end by itself gives back.
func (r *Reservation) Released() []float64 {
	if r.Release {
		return r.Credit()
	}
	return make([]float64, len(r.Buckets))
}
