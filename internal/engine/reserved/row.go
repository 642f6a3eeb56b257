package reserved

import (
	"encoding/json"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/engine/store"
)

func (r *Reservation) parameters() []any {
	b := &r.Buckets[0]
	return []any{
		r.ID, r.State, r.ReadyUs, r.StaleUs, r.StartedUs, r.ExpiresUs, r.Release,
		b.Name, b.Key.Key, b.Shard, orNull(b.Plan), orNull(b.Calendar), b.Cost,
		b.Capacity, b.Rate, b.Steps, b.StepUs, b.PhaseUs, b.Lowest, b.PaidUs, b.Owed, b.Settled, othersOf(r.Buckets),
	}
}

// othersOf returns the column others for the buckets behind the first.
func othersOf(buckets []Reserved) *string {
	if len(buckets) == 1 {
		return nil
	}
	text, err := json.Marshal(buckets[1:])
	if err != nil { // a number that is none, which no column takes either
		panic(err)
	}
	return new(string(text))
}

// setKnown notes that the reservation is stored as it is now.
func (r *Reservation) setKnown() {
	r.known = &store.Known{State: r.State, ReadyUs: r.ReadyUs, StartedUs: r.StartedUs, ExpiresUs: r.ExpiresUs}
}

func (r *Reservation) end() store.End {
	b := &r.Buckets[0]
	e := store.End{
		ID: r.ID, ReadyUs: r.ReadyUs, PaidUs: b.PaidUs, Owed: b.Owed, Others: r.others,
		State: r.State, Settled: r.Buckets[0].Settled, NowUs: r.NowUs,
	}
	if others := othersOf(r.Buckets); others != nil {
		e.Rest = json.RawMessage(*others)
	}
	return e
}

// isAsRead reports whether the reservation would be saved as it was read.
func (r *Reservation) isAsRead() bool {
	k := r.known
	return k != nil && r.State == k.State && r.ReadyUs == k.ReadyUs && r.ExpiresUs == k.ExpiresUs &&
		(r.StartedUs == k.StartedUs || r.StartedUs != nil && k.StartedUs != nil && *r.StartedUs == *k.StartedUs)
}

// orNull returns a parameter that is null for an empty text.
func orNull(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

func columnsOf(prefix string) string {
	return prefix + strings.ReplaceAll("state,ready_us,stale_us,started_us,expires_us,release,name,key,shard,plan,"+
		"calendar,cost,capacity,rate,steps,step_us,phase_us,lowest,paid_us,owed,settled,others", ",", ","+prefix) + "::text"
}

// scan reads a row with these columns, behind others.
func (r *Reservation) scan(row pgx.Row, before ...any) error {
	var b Reserved
	var plan, calendar, others *string
	err := row.Scan(append(before, &r.State, &r.ReadyUs, &r.StaleUs, &r.StartedUs, &r.ExpiresUs, &r.Release,
		&b.Name, &b.Key.Key, &b.Shard, &plan, &calendar, &b.Cost,
		&b.Capacity, &b.Rate, &b.Steps, &b.StepUs, &b.PhaseUs, &b.Lowest, &b.PaidUs, &b.Owed, &b.Settled, &others)...)
	if r.Buckets = nil; err != nil || b.Name == "" {
		return err
	}
	if plan != nil {
		b.Plan = *plan
	}
	if calendar != nil {
		b.Calendar = *calendar
	}
	r.Buckets = []Reserved{b}
	r.setKnown()
	if others == nil {
		return nil
	}
	r.others = json.RawMessage(*others)
	var rest []Reserved
	err = json.Unmarshal([]byte(*others), &rest)
	r.Buckets = append(r.Buckets, rest...)
	return err
}
