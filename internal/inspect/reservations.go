package inspect

import (
	"context"
	"encoding/json"
	"math"
	"regexp"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// Reservation is a stored reservation.
type Reservation struct {
	// ID is its identity.
	ID string `json:"id"`
	// State is "open", "settled", "cancelled" or "expired".
	State string `json:"state"`
	// ReadyAt is when the work may begin, and StaleAt when it has lost its turn; zero: never.
	ReadyAt time.Time `json:"ready_at"`
	StaleAt time.Time `json:"stale_at,omitzero"`
	// StartedAt is when the work began. Zero: it has not.
	StartedAt time.Time `json:"started_at,omitzero"`
	// ExpiresAt is when it ends by itself, or its record goes.
	ExpiresAt time.Time `json:"expires_at"`
	// Release is whether it then returns its tokens.
	Release bool `json:"release"`
	// Items are its parts, one for each bucket.
	Items []Item `json:"items"`
}

// Life returns the stage of the reservation and its time: "waiting until" or "ready since" its ReadyAt, or "started" or
// "turn lost" at an instant. For other stages it returns the State and the zero time.
func (r *Reservation) Life(now time.Time) (string, time.Time) {
	switch {
	case r.State != "open":
		return r.State, time.Time{}
	case !r.StartedAt.IsZero():
		return "started", r.StartedAt
	case r.ReadyAt.After(now):
		return "waiting until", r.ReadyAt
	case !r.StaleAt.IsZero() && !r.StaleAt.After(now):
		return "turn lost", r.StaleAt
	}
	return "ready since", r.ReadyAt
}

// Item is what a reservation took from one bucket.
type Item struct {
	// Limit, Key and Plan name the bucket; Key is as stored.
	Limit string `json:"limit"`
	Key   string `json:"key"`
	Plan  string `json:"plan"`
	// Cost is the number of tokens reserved, and Settled what the work cost in the end; nil: it was not settled.
	Cost    float64  `json:"cost"`
	Settled *float64 `json:"settled,omitempty"`
}

// ReservationQuery is which reservations to return, in the order of their ends.
type ReservationQuery struct {
	// State is "open", "settled", "cancelled" or "expired". Empty: all.
	State string
	// Limit and Key select by the limit and the stored key of one of the buckets. Nil Key: any; empty Limit: any.
	// Keys are the keys if there are several.
	Limit string
	Key   *string
	Keys  []string
	// Waiting selects open reservations whose work may not begin yet.
	Waiting bool
	// After is the last one before. Nil: with the first.
	After *ReservationPosition
	// Most is how many to return, up to 1000. Defaults to 50.
	Most int
}

// ReservationPosition is a place in the order of reservations.
type ReservationPosition struct {
	ExpiresAt time.Time
	ID        string
}

// Reservations is what a query for reservations has found.
type Reservations struct {
	// List has at most the requested number. It may have fewer, or none, although more follow: see Next.
	List []Reservation
	// Next is where the next query continues. Nil means the end.
	Next *ReservationPosition
}

// lookReservations is how many reservations a query looks at.
const lookReservations = 25_000

var validID = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)

// Reservations returns reservations. It looks at 25,000 at most.
func (r *Reader) Reservations(ctx context.Context, query ReservationQuery) (Reservations, error) {
	if err := query.check(); err != nil {
		return Reservations{}, err
	}
	most, err := checkMost("Most", query.Most, defaultMost)
	if err != nil {
		return Reservations{}, err
	}
	keys := query.Keys
	if query.Key != nil {
		keys = []string{*query.Key}
	}
	afterUs, afterID := int64(math.MinInt64), "00000000-0000-0000-0000-000000000000"
	if query.After != nil {
		afterUs, afterID = query.After.ExpiresAt.UnixMicro(), query.After.ID
	}
	rows, err := collect(ctx, r, "reservations", rowToReservation, r.sql.reservations, afterUs, afterID,
		r.look.reservations,
		query.State, query.Waiting, query.Limit, keys, most+1)
	if err != nil || len(rows) == 0 {
		return Reservations{}, err
	}
	isCut := rows[len(rows)-1].n == r.look.reservations
	if len(rows) > most {
		rows, isCut = rows[:most], true
	}
	var found Reservations
	for _, row := range rows {
		if row.matches {
			found.List = append(found.List, row.Reservation)
		}
	}
	if isCut {
		last := rows[len(rows)-1]
		found.Next = &ReservationPosition{ExpiresAt: last.ExpiresAt, ID: last.ID}
	}
	return found, nil
}

func (q *ReservationQuery) check() error {
	if q.State != "" && !slices.Contains([]string{"open", "settled", "cancelled", "expired"}, q.State) {
		return invalid("the state is %.20q; use open, settled, cancelled or expired", q.State)
	}
	if q.Key != nil {
		if err := checkKey("the key", *q.Key); err != nil {
			return err
		}
	}
	if q.After != nil && !validID.MatchString(q.After.ID) {
		return invalid("the ID of After is %.80q; use the Next of the query before", q.After.ID)
	}
	return checkName(q.Limit)
}

// Reservation returns the reservation with an ID. found is false when there is none.
func (r *Reader) Reservation(ctx context.Context, id string) (_ Reservation, found bool, err error) {
	if !validID.MatchString(id) {
		return Reservation{}, false, nil
	}
	rows, err := collect(ctx, r, "reservation", rowToReservation, r.sql.reservation, id)
	if err != nil || len(rows) == 0 {
		return Reservation{}, false, err
	}
	return rows[0].Reservation, true, nil
}

// reservationRow is a reservation that was looked at.
type reservationRow struct {
	Reservation
	matches bool
	n       int // how many were looked at
}

func rowToReservation(row pgx.CollectableRow) (r reservationRow, err error) {
	var (
		readyUs, expiresUs int64
		staleUs, startedUs *int64
		plan, others       *string
		first              Item
	)
	if err := row.Scan(&r.ID, &r.State, &readyUs, &staleUs, &startedUs, &expiresUs, &r.Release,
		&first.Limit, &first.Key, &plan, &first.Cost, &first.Settled, &others, &r.matches, &r.n); err != nil {
		return r, err
	}
	if plan != nil {
		first.Plan = *plan
	}
	r.ReadyAt, r.StaleAt, r.StartedAt, r.ExpiresAt = instant(readyUs), optional(staleUs), optional(startedUs),
		instant(expiresUs)
	r.Items = []Item{first}
	if others == nil {
		return r, nil
	}
	var rest []struct {
		Name, Key, Plan string
		Cost            float64
		Settled         *float64
	}
	if err := json.Unmarshal([]byte(*others), &rest); err != nil {
		return r, err
	}
	for _, o := range rest {
		if last := &r.Items[len(r.Items)-1]; last.Limit == o.Name && last.Key == o.Key { // another row of the bucket
			last.Cost += o.Cost
			if last.Settled != nil && o.Settled != nil {
				last.Settled = new(*last.Settled + *o.Settled)
			}
			continue
		}
		r.Items = append(r.Items, Item{Limit: o.Name, Key: o.Key, Plan: o.Plan, Cost: o.Cost, Settled: o.Settled})
	}
	return r, nil
}
