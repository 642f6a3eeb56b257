package store

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Engine keeps rows where there is no Postgres: package memstore does, for the tests of users. It locks rows, reads and
// writes them, and decides nothing. A Session on one goes the general way: what it does between a read and a write is the
// same code. One Engine is a transaction, or the pool, of which each call is a transaction of its own. Instants are
// microseconds since 1970.
//
// An error of Lock, LockReservation and LockDue fails the transaction, as that of a statement does.
type Engine interface {
	// Read returns what the rows hold, and whether they are there.
	Read(rows []bucket.Key) (states []bucket.State, found []bool, err error)
	// Lock locks the rows to the end of the transaction, in the order given, and waits for whoever holds one. It returns what
	// they hold, and whether they are there.
	Lock(ctx context.Context, rows []bucket.Key) (states []bucket.State, found []bool, err error)
	// Save writes rows that are locked.
	Save(rows []bucket.Key, states []bucket.State) error
	// BoundWait bounds how long what follows in the transaction waits for a row.
	BoundWait(most time.Duration)

	// Savepoint marks the place in the transaction that Undo goes back to. Locks since are released by that.
	Savepoint()
	Undo() error
	// Spoil makes the transaction one that can only be rolled back.
	Spoil()

	// InsertReservation and SaveReservation keep a reservation.
	InsertReservation(r *Reservation) error
	SaveReservation(r *Reservation) error
	// LockReservation locks and returns a reservation. It returns ErrNotReserved when there is none.
	LockReservation(ctx context.Context, id string) (*Reservation, error)
	// Due returns up to most reservations that are open and end before now, and that come after the one named, by their ends.
	Due(now, after int64, last string, most int) ([]*Reservation, error)
	// LockDue locks those of the reservations that are open and end before now, and that nobody else has locked.
	LockDue(ids []string, now int64) ([]*Reservation, error)
	// ForgetEnded deletes the reservations that are not open and ended before an instant.
	ForgetEnded(before int64)

	// ReportPrice adds the report to what is known of its upstream, or makes that. ReadPrice reads it, and TurnPrice ends its
	// epoch unless somebody else has: Report.HasUpstream and Report.Upstream are the answer.
	ReportPrice(r *Report, now int64)
	ReadPrice(r *Report, now int64)
	TurnPrice(r *Report, now int64)
	// ForgetPrices deletes what was reported last before an instant.
	ForgetPrices(before int64)

	// Prune deletes the rows of a limit that nobody holds and that are spare. It returns how many those were.
	Prune(name string, isSpare func(bucket.State) bool) (int64, error)

	// Fingerprint returns what was stored first, own when that is nothing yet. An empty own stores nothing.
	Fingerprint(own string) string
}

// EngineOf returns the Engine that conn stands for, and nil when it is Postgres.
func EngineOf(conn Conn) Engine {
	if e, ok := conn.(interface{ Engine() Engine }); ok {
		return e.Engine()
	}
	return nil
}

// engineOf is EngineOf for a store that is on one.
func (s *Store) engineOf(conn Conn) Engine {
	if s == nil || !s.onEngine {
		return nil
	}
	return EngineOf(conn)
}

// IsElsewhere reports whether the session is in a transaction that is none of the engine that the store is on.
func (s *Session) IsElsewhere() bool { return s.onEngine && s.engine == nil }

// inSQL reports whether statements may decide by themselves.
func (s *Session) inSQL() bool { return decidesInSQL && s.engine == nil && !s.routed() }

// instant returns what time it is for the engine.
func (s *Session) instant() int64 {
	if asOf := s.now(); asOf != nil {
		return *asOf
	}
	return time.Now().UnixMicro()
}

// keysAlone returns the keys of rows.
func keysAlone(rows []bucket.Ask) []bucket.Key {
	keys := make([]bucket.Key, len(rows))
	for i := range rows {
		keys[i] = rows[i].Key
	}
	return keys
}

// readEngine is readRows.
func (s *Session) readEngine(rows []bucket.Ask) ([]bucket.Answer, error) {
	now := s.instant()
	states, found, err := s.engine.Read(keysAlone(rows))
	if err != nil {
		return nil, err
	}
	answers := make([]bucket.Answer, len(rows))
	for i := range rows {
		answers[i] = bucket.Answer{State: states[i], Now: now, Absent: !found[i]}
		if !found[i] {
			answers[i].State = rows[i].Terms.Full(now)
		}
	}
	return answers, nil
}

// lockEngine is lockRows.
func (s *Session) lockEngine(ctx context.Context, p *bucket.Page) error {
	p.Now = s.instant() // as that of a statement, before it waits
	states, found, err := s.engine.Lock(ctx, keysAlone(p.Rows))
	if err != nil {
		return err
	}
	for i := range p.Rows {
		p.Put(i, states[i], !found[i])
	}
	return nil
}

// saveEngine is save. It deletes no row, because Lock inserts none.
func (s *Session) saveEngine(p *bucket.Page) error {
	var saved []bucket.Key
	var states []bucket.State
	p.Changes(func(k bucket.Key, state bucket.State) { saved, states = append(saved, k), append(states, state) }, func(bucket.Key) {})
	return s.engine.Save(saved, states)
}

// exchangeOnEngine reports prices, reads them or ends their epochs.
func (s *Session) exchangeOnEngine(reports []*Report, exchange func(*Report, int64)) error {
	now := s.instant()
	for _, r := range reports {
		exchange(r, now)
	}
	return nil
}

// pruneEngine is Prune.
func (s *Session) pruneEngine(termsOf map[string][]bucket.Terms) (deleted int64, err error) {
	until := s.instant() - pruneIdle.Microseconds()
	for name, terms := range termsOf {
		rows := oneRowEach(terms)
		n, err := s.engine.Prune(name, func(state bucket.State) bool { return isSpare(state, rows, until) })
		if err != nil {
			return 0, err
		}
		deleted += n
	}
	return deleted, nil
}

// isSpare reports whether a row was full under the terms of each ask at until. It mirrors buckets_prune.sql.
func isSpare(s bucket.State, rows []bucket.Ask, until int64) bool {
	since := s.TS
	if s.Parts != nil && len(s.Parts.Taken) > 0 {
		since += int64(s.Parts.Taken[0])
	}
	late := s.Parts != nil && slices.ContainsFunc(s.Parts.Leases, func(end int64) bool { return end > until })
	if s.TS > until || late {
		return false
	}
	return !slices.ContainsFunc(rows, func(a bucket.Ask) bool {
		t := &a.Terms
		return !(s.Value+float64((until-since)/t.Step)*t.Rate/t.Steps >= t.Capacity)
	})
}

// dueOnEngine is Next.
func (d *DueReservations) dueOnEngine() (ids []string, err error) {
	due, err := d.session.engine.Due(d.session.instant(), d.after, d.last, expirePage)
	if err != nil {
		return nil, err
	}
	for _, r := range due {
		ids, d.after, d.last = append(ids, r.ID), r.ExpiresUs, r.ID
	}
	d.done = len(ids) < expirePage
	return ids, nil
}

// calendarOnEngine says when the windows of a calendar begin by the time zone data of this program.
func (s *Session) calendarOnEngine(c bucket.Calendar) (*knownTable, error) {
	zone, err := time.LoadLocation(c.Zone)
	if err != nil {
		return nil, &ZoneError{c.Zone}
	}
	local, now := time.Now(), s.instant()
	return &knownTable{table: c.LocalTable(zone, now), ahead: now - local.UnixMicro(), again: local.Add(calendarAge)}, nil
}

// engineBlocks is the size of an engine, which is pruned at once.
const engineBlocks = 1

// queueSavepoint marks the place that undo goes back to.
func (s *Session) queueSavepoint(batch *pgx.Batch) {
	if s.engine != nil {
		s.engine.Savepoint()
		return
	}
	batch.Queue("SAVEPOINT " + savepoint)
}
