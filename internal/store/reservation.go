package store

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// The states of a reservation, as its row has them.
const (
	Open      = "open"
	Settled   = "settled"
	Cancelled = "cancelled"
	Expired   = "expired"
)

// Keeping is how long a new reservation is kept, and what becomes of it then.
type Keeping struct {
	StaleAfter  time.Duration // after it is ready; 0: never
	ExpireAfter time.Duration // after it is ready
	Release     bool          // whether what it took is given back when it expires
	OnlyLater   bool          // whether none is kept of what is ready at once

	NotBefore int64    // the instant before which it is not ready
	Plans     []string // of each bucket's key; empty when none is on one
}

// Reservation is a row of the reservations table. Element n of every slice is about the n-th bucket.
type Reservation struct {
	ID        string
	State     string
	ReadyUs   int64
	StaleUs   *int64
	StartedUs *int64
	ExpiresUs int64
	Release   bool

	Names, Keys       []string
	Costs, Capacities []float64
	Rates, Steps      []float64
	StepUs, PhaseUs   []int64
	Lowest            []float64
	Shards            []int32   // empty when each bucket is one row, as before there were shards
	Plans             []string  // empty when no key was on one
	Calendars         []string  // empty when no limit follows one; see calendarText
	Prices            []float64 // at which each bucket was taken from; empty when each was at 1
	PaidUs            []int64   // when each bucket owes nothing any more

	NowUs int64
	// TermsNow are the terms that the limits have now, as far as this process knows, and PausedUntil the end of the latest
	// of their pauses: the owner of the session sets them.
	TermsNow    []bucket.Terms
	PausedUntil int64
}

// newReservation returns the reservation of what was taken.
func newReservation(asks []bucket.Ask, answers []bucket.Answer, keep *Keeping) *Reservation {
	r := &Reservation{ID: newID(), State: Open, Release: keep.Release, Shards: []int32{}, Plans: append([]string{}, keep.Plans...)}
	r.PaidUs, r.ReadyUs = ReadyAt(asks, answers, keep.NotBefore)
	if keep.StaleAfter > 0 {
		stale := r.ReadyUs + keep.StaleAfter.Microseconds()
		r.StaleUs = &stale
	}
	r.ExpiresUs = r.ReadyUs + keep.ExpireAfter.Microseconds()
	for i := range asks {
		a := &asks[i]
		t, lowest := &a.Terms, a.Lowest
		if a.MayOwe { // which a price may have lowered
			lowest = -t.MaxDebt
		}
		r.Names, r.Keys, r.Costs = append(r.Names, a.Key.Name), append(r.Keys, a.Key.Key), append(r.Costs, a.Cost)
		r.Capacities, r.Rates, r.Steps = append(r.Capacities, t.Capacity), append(r.Rates, t.Rate), append(r.Steps, t.Steps)
		r.StepUs, r.PhaseUs, r.Lowest = append(r.StepUs, t.Step), append(r.PhaseUs, t.Phase), append(r.Lowest, lowest)
		if bucket.AnySharded(asks) {
			r.Shards = append(r.Shards, t.Shards)
		}
	}
	r.Calendars, r.Prices = calendarsOf(asks), pricesOf(asks)
	return r
}

// ReadyAt returns the instants from which each of the buckets owes nothing any more, and the latest of those that are enforced and of
// notBefore.
func ReadyAt(asks []bucket.Ask, answers []bucket.Answer, notBefore int64) (paid []int64, ready int64) {
	ready = max(answers[0].Now, notBefore)
	for i := range asks {
		paid = append(paid, answers[0].Now+asks[i].ReadyAfter(answers[i]).Microseconds())
		if !asks[i].Unenforced {
			ready = max(ready, paid[i])
		}
	}
	return paid, ready
}

// newID returns a random UUID (RFC 9562, version 4).
func newID() string {
	var b [16]byte
	rand.Read(b[:]) // never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	h := hex.EncodeToString(b[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// reserve makes the reservation of what c took, when c reserves and was allowed.
func (c *Call) reserve() {
	c.Reservation = nil
	if c.Reserve == nil || !bucket.AllAllowed(c.Answers) {
		return
	}
	r := newReservation(c.Asks, c.Answers, c.Reserve)
	if !c.Reserve.OnlyLater || r.ReadyUs > c.Answers[0].Now {
		c.Reservation = r
	}
}

// record records the reservation of what c took.
func (s *Session) record(ctx context.Context, c *Call) error {
	if c.reserve(); c.Reservation == nil {
		return nil
	}
	return s.save(ctx, bucket.NewPage(c.Asks), c.Reservation)
}

// LockReservation reads the reservation id and locks it to the end of the transaction.
func (s *Session) LockReservation(ctx context.Context, id string) (*Reservation, error) {
	if err := s.LearnLayout(ctx); err != nil {
		return nil, err
	}
	return s.engine().LockReservation(ctx, &s.Unit, id)
}

// SaveReservation writes what may have changed of r.
func (s *Session) SaveReservation(ctx context.Context, r *Reservation) error {
	return s.engine().SaveReservation(ctx, &s.Unit, r)
}

// queueReservations queues the insertion of reservations.
func (u *Unit) queueReservations(batch *pgx.Batch, made []*Reservation) {
	for _, r := range made {
		batch.Queue(u.statements.reservationInsert, r.ID, r.ReadyUs, r.StaleUs, r.ExpiresUs, r.Release,
			r.Names, r.Keys, r.Costs, r.Capacities, r.Rates, r.Steps, r.StepUs, r.PhaseUs, r.Lowest, r.Shards, r.Plans, r.Calendars, r.Prices, r.PaidUs)
	}
}

// LockReservation locks the reservation, and reads it. The statement inserts one if there is none, which is undone.
func (postgres) LockReservation(ctx context.Context, u *Unit, id string) (*Reservation, error) {
	batch := &pgx.Batch{}
	batch.Queue("SAVEPOINT " + savepoint)
	batch.Queue(u.statements.reservationLock, id, u.now())
	r := &Reservation{ID: id}
	err := u.send(ctx, batch, func(results pgx.BatchResults) error {
		if err := skip(results, 1); err != nil {
			return err
		}
		return results.QueryRow().Scan(r.columns()...)
	})
	return r.orNone(ctx, u, err)
}

// orNone returns the reservation that a statement has locked. One without buckets was inserted by the statement, and is undone.
func (r *Reservation) orNone(ctx context.Context, u *Unit, err error) (*Reservation, error) {
	if err == nil && len(r.Names) == 0 {
		if err = (postgres{}).Undo(ctx, u, nil); err == nil {
			err = ErrNotReserved
		}
	}
	if err != nil {
		return nil, err
	}
	return r, nil
}

// SaveReservation writes the reservation later.
func (postgres) SaveReservation(ctx context.Context, u *Unit, r *Reservation) error {
	batch := &pgx.Batch{}
	batch.Queue(u.statements.reservationSave, r.ID, r.State, r.ReadyUs, r.StaleUs, r.StartedUs, r.ExpiresUs,
		r.Capacities, r.Rates, r.Steps, r.StepUs, r.PhaseUs, r.Lowest, r.Shards, r.Calendars, r.PaidUs)
	return u.sendLater(ctx, batch, func(err error) error { return err })
}

// columns are where the columns of a reservation that has been locked are scanned to.
func (r *Reservation) columns() []any {
	return []any{
		&r.State, &r.ReadyUs, &r.StaleUs, &r.StartedUs, &r.ExpiresUs, &r.Release,
		&r.Names, &r.Keys, &r.Costs, &r.Capacities, &r.Rates, &r.Steps, &r.StepUs, &r.PhaseUs, &r.Lowest, &r.Shards, &r.Plans, &r.Calendars,
		&r.Prices, &r.PaidUs, &r.NowUs,
	}
}

// TermsMade returns the terms under which the reservation took from its i-th bucket.
func (r *Reservation) TermsMade(i int) bucket.Terms {
	shards := int32(1)
	if i < len(r.Shards) {
		shards = r.Shards[i]
	}
	return bucket.Terms{
		Kind: kindOf(r.Calendars, i), Shards: shards, Capacity: r.Capacities[i], Rate: r.Rates[i], Steps: r.Steps[i], Step: r.StepUs[i], Phase: r.PhaseUs[i],
		MaxDebt: -r.Lowest[i], Reserves: true,
	}
}

// Plan returns the plan that the key of the i-th bucket was on.
func (r *Reservation) Plan(i int) string {
	if i < len(r.Plans) {
		return r.Plans[i]
	}
	return ""
}

// pricesOf returns the price of each ask, and none when each is 1.
func pricesOf(asks []bucket.Ask) []float64 {
	prices, differ := make([]float64, len(asks)), false
	for i := range asks {
		prices[i] = asks[i].Price()
		differ = differ || prices[i] != 1
	}
	if !differ {
		return []float64{}
	}
	return prices
}

// Price returns the price at which the reservation took from its i-th bucket.
func (r *Reservation) Price(i int) float64 {
	if i < len(r.Prices) {
		return r.Prices[i]
	}
	return 1
}

// Asks returns what the reservation took, under the terms that its limits have now, to take or charge it again.
// What is given back was there when it was taken, so a credit may fill a bucket as far as the terms of either
// time allow: where these are of another plan than the key's, nothing is lost to its capacity.
func (r *Reservation) Asks() []bucket.Ask {
	asks := make([]bucket.Ask, len(r.Names))
	for i := range asks {
		asks[i] = bucket.Ask{
			Key:   bucket.Key{Name: r.Names[i], Key: r.Keys[i]},
			Terms: r.TermsNow[i],
			Cost:  r.Costs[i], Lowest: -r.TermsNow[i].MaxDebt, Most: r.Capacities[i],
		}
		if price := r.Price(i); price != 1 {
			asks[i].Asked, asks[i].MayOwe = r.Costs[i]/price, true
			asks[i].AllowPrice()
		}
	}
	return asks
}

// Charge returns the charge of amounts to the reservation's buckets. A bucket gives back to the step in which it had paid.
func (r *Reservation) Charge(amounts []float64) Charge {
	c := Charge{Asks: r.Asks(), Amounts: amounts, Taken: r.PaidUs}
	if len(c.Taken) == 0 { // it was made before PaidUs was kept
		c.Taken = slices.Repeat([]int64{r.ReadyUs}, len(amounts))
	}
	return c
}

// Reopen moves a reservation whose costs were taken again, under the terms that its limits have now, to the instant at
// which it is ready. Its buckets owe nothing from the instants paid on.
func (r *Reservation) Reopen(paid []int64, ready int64) {
	if r.StaleUs != nil {
		stale := ready + (*r.StaleUs - r.ReadyUs)
		r.StaleUs = &stale
	}
	r.ExpiresUs += ready - r.ReadyUs
	r.State, r.ReadyUs, r.PaidUs, r.StartedUs = Open, ready, paid, nil
	r.Shards = make([]int32, len(r.TermsNow))
	for i, t := range r.TermsNow {
		r.Capacities[i], r.Rates[i], r.Steps[i], r.StepUs[i], r.PhaseUs[i] = t.Capacity, t.Rate, t.Steps, t.Step, t.Phase
		r.Lowest[i], r.Shards[i] = -t.MaxDebt, t.Shards
	}
	r.Calendars = calendarsOf(r.Asks())
}

// Index returns the bucket of that key, or -1.
func (r *Reservation) Index(k bucket.Key) int {
	for i := range r.Names {
		if r.Names[i] == k.Name && r.Keys[i] == k.Key {
			return i
		}
	}
	return -1
}

// Refund returns the amounts that give back all the reservation took.
func (r *Reservation) Refund() []float64 {
	amounts := make([]float64, len(r.Costs))
	for i, cost := range r.Costs {
		amounts[i] = -cost
	}
	return amounts
}

// Released returns the amounts that the end by itself gives back.
func (r *Reservation) Released() []float64 {
	if r.Release {
		return r.Refund()
	}
	return make([]float64, len(r.Costs))
}
