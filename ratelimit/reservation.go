package ratelimit

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// ReservationState is where a reservation is in its life.
type ReservationState string

// The states of a reservation. It begins open; the others are final, but that Renew opens it again.
const (
	Open      ReservationState = "open"
	Settled   ReservationState = "settled"
	Cancelled ReservationState = "cancelled"
	Expired   ReservationState = "expired"
)

// reservation is a row of the reservations table. Element n of every slice is about the n-th bucket.
type reservation struct {
	ID        string
	State     ReservationState
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
	Shards            []int32 // empty when each bucket is one row, as before there were shards

	NowUs int64
	now   []bucket.Terms // that the limits have now, as far as this process knows
}

var validID = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)

// newID returns a random UUID (RFC 9562, version 4).
func newID() string {
	var b [16]byte
	rand.Read(b[:]) // never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	h := hex.EncodeToString(b[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// queueRecord queues the insertion of the reservation r of plan p.
func (l *Limiter) queueRecord(batch *pgx.Batch, p *plan, r Reservation) {
	c := p.columns()
	expires := r.ReadyAt.Add(l.config.ExpireAfter)
	batch.Queue(l.statements.reservationInsert, r.ID, r.ReadyAt.UnixMicro(), optionalMicros(r.StaleAt),
		expires.UnixMicro(), l.config.ReleaseExpired, c.names, c.keys, c.costs, c.capacities, c.rates, c.perPeriod, c.steps, c.phases, c.lowest, p.shards())
}

// withReservation runs fn on the locked reservation id: in the caller's transaction, behind a savepoint,
// when l is bound to one, else in one of its own.
func (l *Limiter) withReservation(ctx context.Context, verb, id string, fn func(*Limiter, *reservation) error) error {
	if err := l.ready(ctx, verb); err != nil {
		return err
	}
	if !validID.MatchString(id) {
		return during(verb, fmt.Errorf("%w: %.80q is not the ID of a Reservation", ErrNotReserved, id))
	}
	began := l.watch()
	err := l.together(ctx, verb, func(tx *Limiter) error {
		r, err := tx.lock(ctx, id)
		if err != nil {
			return err
		}
		return fn(tx, r)
	})
	if err != nil {
		err = during(verb+" "+id, l.explain(err))
		if !errors.Is(err, ErrNotReserved) && !errors.Is(err, ErrReservationEnded) && !errors.Is(err, ErrInvalidRequest) && !errors.Is(err, ErrCostExceedsCapacity) {
			l.fail(ctx, Failed{Verb: verb, Err: err}, began)
		}
		return err
	}
	return nil
}

// lock reads the reservation id and locks it to the end of the transaction.
func (l *Limiter) lock(ctx context.Context, id string) (*reservation, error) {
	batch := &pgx.Batch{}
	batch.Queue("SAVEPOINT " + savepoint)
	batch.Queue(l.statements.reservationLock, id, l.asOf())
	results := l.db.SendBatch(ctx, batch)
	r, err := scanReservation(results)
	if closeErr := results.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return nil, err
	}
	if len(r.Names) > 0 {
		r.ID, r.now = id, l.termsNow(r)
		return r, nil
	}
	if err := l.undo(ctx); err != nil { // the statement made one
		return nil, err
	}
	return nil, ErrNotReserved
}

func scanReservation(results pgx.BatchResults) (*reservation, error) {
	if _, err := results.Exec(); err != nil {
		return nil, err
	}
	var r reservation
	return &r, results.QueryRow().Scan(r.columns()...)
}

// columns are where the columns of a reservation that has been locked are scanned to.
func (r *reservation) columns() []any {
	return []any{
		&r.State, &r.ReadyUs, &r.StaleUs, &r.StartedUs, &r.ExpiresUs, &r.Release,
		&r.Names, &r.Keys, &r.Costs, &r.Capacities, &r.Rates, &r.Steps, &r.StepUs, &r.PhaseUs, &r.Lowest, &r.Shards, &r.NowUs,
	}
}

// save writes what may have changed of r.
func (l *Limiter) save(ctx context.Context, r *reservation) error {
	_, err := l.db.Exec(ctx, l.statements.reservationSave, r.ID, string(r.State), r.ReadyUs, r.StaleUs, r.StartedUs, r.ExpiresUs,
		r.Capacities, r.Rates, r.Steps, r.StepUs, r.PhaseUs, r.Lowest, r.Shards)
	return err
}

// charge takes amounts from the plan's buckets whatever they hold, or credits them where negative and
// while the bucket's step begins no later than until.
func (l *Limiter) charge(ctx context.Context, p *plan, amounts []float64, until []int64) error {
	if p.sharded() || !decidesInSQL {
		return l.inTx(ctx, func(tx *Limiter) error { return tx.chargeHeld(ctx, p, amounts, until) })
	}
	l.enter(ctx, p)
	c := p.columns()
	for i := range p.buckets {
		if amounts[i] < 0 {
			c.capacities[i] = max(c.capacities[i], p.buckets[i].most)
		}
	}
	return l.change(ctx, p.buckets, l.statements.charge, c.names, c.keys, c.shards, amounts, c.capacities, c.rates,
		c.steps, c.perPeriod, c.phases, until, l.asOf(), c.tolerances)
}

// made returns the terms under which the reservation took from its i-th bucket.
func (r *reservation) made(i int) bucket.Terms {
	shards := int32(1)
	if i < len(r.Shards) {
		shards = r.Shards[i]
	}
	return bucket.Terms{Shards: shards, Capacity: r.Capacities[i], Rate: r.Rates[i], Steps: r.Steps[i], Step: r.StepUs[i], Phase: r.PhaseUs[i], MaxDebt: -r.Lowest[i], Reserves: true}
}

// termsNow returns the terms that the limits of r have now: those that were last used under their names, and
// those that r was made under for names that this Limiter was not used with.
func (l *Limiter) termsNow(r *reservation) []bucket.Terms {
	now := make([]bucket.Terms, len(r.Names))
	for i, name := range r.Names {
		last, known := l.policies.last(name)
		if !known {
			now[i] = r.made(i)
			continue
		}
		now[i] = Limit{name: name, terms: last}.termsFor(r.Keys[i])
	}
	return now
}

// plan returns what the reservation took, under the terms that its limits have now, to take or charge it again.
// What is given back was there when it was taken, so a credit may fill a bucket as far as the terms of either
// time allow: where these are of another plan than the key's, nothing is lost to its capacity.
func (r *reservation) plan() *plan {
	p := &plan{}
	for i := range r.Names {
		p.buckets = append(p.buckets, ask{
			limit: Limit{name: r.Names[i]},
			key:   r.Keys[i],
			terms: r.now[i],
			cost:  r.Costs[i], lowest: -r.now[i].MaxDebt, most: r.Capacities[i],
		})
		p.asked = append(p.asked, asked{bucket: i, cost: r.Costs[i]})
	}
	return p
}

// remake records that r took under the terms that its limits have now.
func (r *reservation) remake() {
	r.Shards = make([]int32, len(r.now))
	for i, t := range r.now {
		r.Capacities[i], r.Rates[i], r.Steps[i], r.StepUs[i], r.PhaseUs[i] = t.Capacity, t.Rate, t.Steps, t.Step, t.Phase
		r.Lowest[i], r.Shards[i] = -t.MaxDebt, t.Shards
	}
}

// index returns the bucket of that key, or -1.
func (r *reservation) index(k bucket.Key) int {
	for i := range r.Names {
		if r.Names[i] == k.Name && r.Keys[i] == k.Key {
			return i
		}
	}
	return -1
}

// refund returns the amounts that give back all the reservation took.
func (r *reservation) refund() []float64 {
	amounts := make([]float64, len(r.Costs))
	for i, cost := range r.Costs {
		amounts[i] = -cost
	}
	return amounts
}

// refundUntil returns, for each bucket, the last step that may be given tokens back: for a fixed window
// the one the reservation was ready in.
func (r *reservation) refundUntil() []int64 {
	until := make([]int64, len(r.Names))
	for i, t := range r.now {
		until[i] = t.RefundUntil(r.ReadyUs)
	}
	return until
}

// untilReady returns how long it takes until the work may run.
func (r *reservation) untilReady() time.Duration {
	return time.Duration(max(0, r.ReadyUs-r.NowUs)) * time.Microsecond
}

// readyAt returns ReadyUs as a time.
func (r *reservation) readyAt() time.Time { return time.UnixMicro(r.ReadyUs) }

// optionalMicros returns t in microseconds since 1970, and nil for the zero time.
func optionalMicros(t time.Time) *int64 {
	if t.IsZero() {
		return nil
	}
	us := t.UnixMicro()
	return &us
}
