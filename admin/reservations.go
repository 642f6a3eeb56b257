package admin

import (
	"context"
	"net/http"
	"strconv"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const mostReservations = 25

// waiting is the state, in addresses, of reservations whose work may not begin yet.
const waiting = "waiting"

// reservationsBody is what the page of reservations shows.
type reservationsBody struct {
	// State is one of States, of which "waiting" are the open ones whose work may not begin yet. Empty: all.
	State, Limit string
	// Key is the key of their bucket if OfKey is set.
	Key    string
	OfKey  bool
	States []string
	List   *part[inspect.Reservations]
	Clock  *part[time.Time]
	// First is whether it is the first page.
	First bool
}

// Address returns the address of this list, or of the page of it that begins after a reservation.
func (b reservationsBody) Address(after *inspect.ReservationPosition) (string, error) {
	pairs := []string{"state", b.State, "limit", b.Limit}
	if b.OfKey {
		pairs = append(pairs, "key", b.Key)
	}
	if after != nil {
		pairs = append(pairs, "after", after.ID, "ends", micros(after.ExpiresAt))
	}
	return link("reservations", pairs...)
}

// reservationBody is what the page of a reservation shows.
type reservationBody struct {
	ID    string
	Found *part[reservationLife]
}

// reservationLife is a reservation with its life so far.
type reservationLife struct {
	inspect.Reservation
	Found bool
	Steps []lifeStep
	Now   time.Time
}

type lifeStep struct {
	What string
	At   time.Time
	// Done is whether it has happened.
	Done bool
}

// reservations lists reservations in the order of their ends.
func (v *visit) reservations() {
	query := v.r.URL.Query()
	body := reservationsBody{
		State: query.Get("state"), Limit: query.Get("limit"), Key: query.Get("key"), OfKey: query.Has("key"),
		First: !query.Has("after"),
		States: []string{
			string(ratelimit.Open), waiting, string(ratelimit.Settled), string(ratelimit.Cancelled),
			string(ratelimit.Expired),
		},
	}
	if !query.Has("state") {
		body.State = string(ratelimit.Open)
	}
	asked := inspect.ReservationQuery{State: body.State, Limit: body.Limit, Most: mostReservations}
	if body.OfKey {
		asked.Key = &body.Key
	}
	if body.State == waiting {
		asked.State, asked.Waiting = "", true
	}
	if us, err := strconv.ParseInt(query.Get("ends"), 10, 64); err == nil && query.Has("after") {
		asked.After = &inspect.ReservationPosition{ExpiresAt: time.UnixMicro(us), ID: query.Get("after")}
	}
	g := v.gather()
	body.Clock = ask(g, "the time", v.reader.Now)
	body.List = ask(g, "the reservations", func(ctx context.Context) (inspect.Reservations, error) {
		return v.reader.Reservations(ctx, asked)
	})
	g.wait()
	g.show("reservations.html", page{Title: "Reservations", Here: "reservations", Body: body})
}

// reservation shows the life of one reservation.
func (v *visit) reservation() {
	body := reservationBody{ID: v.r.URL.Query().Get("id")}
	g := v.gather()
	body.Found = ask(g, "the reservation", func(ctx context.Context) (life reservationLife, err error) {
		if life.Now, err = v.reader.Now(ctx); err != nil {
			return life, err
		}
		life.Reservation, life.Found, err = v.reader.Reservation(ctx, body.ID)
		life.Steps = stepsOf(life.Reservation, life.Now)
		return life, err
	})
	g.wait()
	if body.Found.Fault == "" && !body.Found.Shows.Found {
		g.visit.show(http.StatusNotFound, "reservation.html", page{Title: "Reservation", Here: "reservations", Body: body})
		return
	}
	g.show("reservation.html", page{Title: "Reservation", Here: "reservations", Body: body})
}

// stepsOf returns the life of a reservation. When it was made is not stored, nor is when it ended.
func stepsOf(r inspect.Reservation, now time.Time) []lifeStep {
	steps := []lifeStep{
		{What: "reserved", Done: true},
		{What: "ready", At: r.ReadyAt, Done: !r.ReadyAt.After(now)},
		{What: "started", At: r.StartedAt, Done: !r.StartedAt.IsZero()},
	}
	if r.State != string(ratelimit.Open) {
		return append(steps, lifeStep{What: r.State, Done: true})
	}
	return append(steps, lifeStep{What: "expires", At: r.ExpiresAt})
}
