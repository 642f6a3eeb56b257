package store

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

type leaseRows struct {
	names, keys         array[text]
	fences, ends, slots array[bigint]
}

func (r *leaseRows) add(k bucket.Key, h bucket.Held) {
	r.names, r.keys, r.fences = append(r.names, text(k.Name)), append(r.keys, text(k.Key)),
		append(r.fences, bigint(h.Fence))
	r.ends, r.slots = append(r.ends, bigint(h.End)), append(r.slots, bigint(h.Slots))
}

// acquireOne has acquire_1 take a lease on slots of one bucket.
func (u *Unit) acquireOne(ctx context.Context, asks []bucket.Ask,
	room []bucket.Answer,
) (answers []bucket.Answer, v verdict, err error) {
	u.enterQueue(ctx, asks)
	a, t := &asks[0], &asks[0].Terms
	since, until := spanOf(t)
	kind, _ := t.Kind.(bucket.Concurrent)
	rows, err := u.conn.Query(ctx, u.statements.acquire, a.Key.Name, a.Key.Key, int64(a.Cost), t.Capacity, kind.Lease,
		a.MinBalance,
		since, until, u.AsOf(), u.mode == alone)
	if err != nil {
		return nil, undecided, err
	}
	defer rows.Close()
	if !rows.Next() {
		return nil, undecided, cmp.Or(rows.Err(), errNoAnswer)
	}
	var r struct { // one allocation
		allowed                pgtype.Bool
		value, capacity        pgtype.Float8
		ts, fence, until, last pgtype.Int8
		now                    int64
		leases                 []int64
	}
	if err := rows.Scan(&r.allowed, &r.value, &r.ts, &r.capacity, &r.fence, &r.until, &r.last, &r.leases,
		&r.now); err != nil {
		return nil, undecided, err
	}
	rows.Close() // or there is no Err yet
	one := bucket.Answer{Allowed: r.allowed.Bool, Now: r.now}
	switch {
	case !r.allowed.Valid:
		v = undecided
	case one.Allowed:
		v = allowed
		newest := bucket.Held{Fence: r.fence.Int64, End: r.until.Int64, Slots: int64(a.Cost)}
		one.State = bucket.Acquired(r.value.Float64, r.ts.Int64, r.capacity.Float64, newest, r.last.Int64)
	default:
		v = refused
		one.State = bucket.State{
			Value: r.value.Float64, TS: r.ts.Int64, Capacity: r.capacity.Float64,
			Parts: &bucket.Parts{Leases: r.leases},
		}
	}
	return append(room[:0], one), v, rows.Err()
}

// LeaseChange is a change of one lease: its renewal, or its release.
type LeaseChange struct {
	Ask    *bucket.Ask
	Fence  int64
	Length int64 // by how much it is renewed, in microseconds; 0: it is released

	// whether a function in the server has decided; if not, nothing was done, and it's decided on the locked row
	Decided    bool
	Held       bool  // whether it was held until now
	NowUs, End int64 // End is after a renewal
}

func (s *Session) changesInSQL(c *LeaseChange) bool {
	return s.memory == nil && (s.mode != alone || s.waitFor == nil) && bucket.Holds(&c.Ask.Terms)
}

// ChangeLease has release_1 or renew_lease_1 change a lease.
func (s *Session) ChangeLease(ctx context.Context, c *LeaseChange) error {
	if c.Decided = false; !s.changesInSQL(c) {
		return nil
	}
	s.enterQueue(ctx, []bucket.Ask{*c.Ask})
	k := &c.Ask.Key
	since, until := spanOf(&c.Ask.Terms)
	statement, parameters := s.statements.release, []any{
		k.Name, k.Key, c.Fence, c.Ask.Terms.Capacity, since, until,
		s.AsOf(),
	}
	if c.Length > 0 {
		statement, parameters = s.statements.renewLease, slices.Insert(parameters, 3, any(c.Length))
	}
	rows, err := s.conn.Query(ctx, statement, parameters...)
	if err != nil {
		return err
	}
	var held pgtype.Bool
	var end pgtype.Int8
	columns := []any{&held, &c.NowUs, &end}
	_, err = pgx.ForEachRow(rows, columns[:len(rows.FieldDescriptions())], func() error { return nil })
	c.Decided, c.Held, c.End = err == nil && held.Valid, held.Bool, end.Int64
	return err
}

// ChangeLeases renews or releases the leases of a call, on Postgres by decide_rows_1: it renews all or none. It decides
// also what ChangeLease leaves undecided.
func (s *Session) ChangeLeases(ctx context.Context, leases []LeaseChange) error {
	changes, asks := make([]change, len(leases)), make([]bucket.Ask, len(leases))
	var lengths []int64
	for i := range leases {
		c := &leases[i]
		asks[i] = *c.Ask
		changes[i] = change{ask: &asks[i], verb: "release", fence: c.Fence, length: c.Length}
		if c.Length > 0 {
			changes[i].verb, lengths = "renew", append(lengths, c.Length)
		}
	}
	if s.memory != nil {
		return s.changeRows(ctx, asks, func(p *bucket.Ledger) {
			held, ends := p.ChangeLeases(asks, leases[0].Fence, lengths)
			for i := range leases {
				leases[i].decide(held[i], p.Now, ends[i])
			}
		})
	}
	answers, err := s.decideInGeneral(ctx, changes, nil)
	for i, a := range answers {
		end := int64(0)
		if a.Allowed && lengths != nil {
			end = a.State.Leases()[0].End
		}
		leases[i].decide(a.Allowed, a.Now, end)
	}
	return err
}

func (c *LeaseChange) decide(held bool, now, end int64) {
	c.Decided, c.Held, c.NowUs, c.End = true, held, now, end
}

// releaseFirst answers the calls that release leases, and returns the others. So their slots are free for the others.
// If another transaction holds one of the rows, they are answered as undecided: each is then decided by itself.
func (s *Session) releaseFirst(ctx context.Context, calls []*Call) (others []*Call) {
	if !slices.ContainsFunc(calls, func(c *Call) bool { return c.Lease != nil }) {
		return calls
	}
	var released []*Call
	for _, c := range calls {
		switch {
		case c.Lease == nil:
			others = append(others, c)
		case s.changesInSQL(c.Lease) && !c.Asks[0].Terms.HasSpan():
			released = append(released, c)
		default:
			c.Answer(nil)
		}
	}
	if len(released) == 0 {
		return others
	}
	release := func() error { return s.release(ctx, released) }
	if len(released) == 1 {
		release = func() error { return s.ChangeLease(ctx, released[0].Lease) }
	}
	began := time.Now()
	err := release()
	switch {
	case err == nil:
	case len(released) > 1 && (wasOvertaken(err) || hasTimedOut(err)):
		err = nil
	default:
		err = s.owner.Retry(ctx, released[0].Verb, err, release)
	}
	if len(released) > 1 && err == nil {
		s.owner.Batched(ctx, len(released), time.Since(began))
	}
	for _, c := range released {
		c.Answer(err)
	}
	return others
}

// release has release_set_1 release leases. It waits for the row if that is the only one.
func (s *Session) release(ctx context.Context, calls []*Call) error {
	var of leaseRows
	for _, c := range calls {
		c.Lease.Decided, c.Lease.Held = false, false
		of.add(c.Asks[0].Key, bucket.Held{Fence: c.Lease.Fence})
	}
	found, err := s.conn.Query(ctx, s.statements.releaseSet, of.names, of.keys, of.fences, s.AsOf(), askForOne(calls))
	if err != nil {
		return err
	}
	var place, now int64
	_, err = pgx.ForEachRow(found, []any{&place, &now}, func() error {
		if place < 1 || place > int64(len(calls)) {
			return errUnasked
		}
		calls[place-1].Lease.Held, calls[place-1].Lease.NowUs = true, now
		return nil
	})
	for _, c := range calls {
		c.Lease.Decided = err == nil
	}
	return err
}

// acquired are the leases that the calls of a group have taken on their bucket.
type acquired struct{ fence, end, last int64 } // the first number, the end of each, and the last end of all leases

// fenceStep is the difference of the numbers that acquire_set_1 gives to the calls for one bucket, as calls in turn
// would get.
const fenceStep = 1 << 16

func (a acquired) ok() bool { return a.end > 0 }

func (s *Session) acquireParameters(rows []*row, waits bool) []any {
	n := len(rows)
	keys, sums, counts := make(array[text], n), make(array[double], n), make(array[bigint], n)
	var places, slots, nths array[bigint]
	for i, r := range rows {
		keys[i], sums[i], counts[i] = text(r.ask.Key.Key), double(r.ask.Cost), bigint(len(r.group.calls))
		for nth, c := range r.group.calls {
			places, slots, nths = append(places, bigint(i+1)), append(slots, bigint(c.Asks[0].Cost)), append(nths, bigint(nth))
		}
	}
	t := &rows[0].ask.Terms
	kind, _ := t.Kind.(bucket.Concurrent)
	since, until := spanOf(t)
	return []any{
		rows[0].ask.Key.Name, keys, sums, counts, places, slots, nths, t.Capacity, kind.Lease, since, until,
		s.AsOf(), waits,
	}
}

// scanAcquired reads the answers of acquire_set_1. The first one for a row counts.
func scanAcquired(found pgx.Rows, rows []*row) error {
	var place int64
	var a bucket.Answer
	var fence, end, last pgtype.Int8
	var leases []int64
	columns := []any{
		&place, &a.Allowed, &a.State.Value, &a.State.TS, &a.State.Capacity, &fence, &end, &last, &leases,
		&a.Now,
	}
	_, err := pgx.ForEachRow(found, columns, func() error {
		if place < 1 || place > int64(len(rows)) {
			return errUnasked
		}
		r := rows[place-1]
		if r.found {
			return nil
		}
		if r.answer, r.found = a, true; a.Allowed {
			r.acquired = acquired{fence.Int64, end.Int64, last.Int64}
		} else {
			r.answer.State.Parts = &bucket.Parts{Leases: leases}
		}
		return nil
	})
	return err
}

// acquireFor takes leases for the calls of one row, and waits for it.
func (s *Session) acquireFor(ctx context.Context, r *row) error {
	r.found, r.answer, r.acquired = false, bucket.Answer{}, acquired{}
	rows := []*row{r}
	found, err := s.conn.Query(ctx, s.statements.acquireSet, s.acquireParameters(rows, true)...)
	if err != nil {
		return err
	}
	return scanAcquired(found, rows)
}

// setAcquired sets the answers to the calls of a group, each of which has taken a lease after those before it. acquired
// stays if the row has other leases, which nobody has read.
func (g *group) setAcquired() {
	r, value := g.row, g.row.answer.State.Value
	for _, c := range g.calls {
		value += c.Asks[0].Cost
	}
	all := &bucket.Parts{Leases: []int64{r.answer.State.TS}}
	for i, c := range g.calls {
		slots := c.Asks[0].Cost
		value -= slots
		c.Answers = c.room()
		c.Answers[0] = r.answer
		newest := bucket.Held{Fence: r.acquired.fence + int64(i)*fenceStep, End: r.acquired.end, Slots: int64(slots)}
		c.Answers[0].State = bucket.Acquired(value, r.answer.State.TS, r.answer.State.Capacity, newest, r.acquired.last)
		all.Leases[0], all.Leases = newest.Fence, append(all.Leases, newest.Fence, newest.End, newest.Slots)
	}
	if r.answer.State.Value+r.ask.Cost == r.answer.State.Capacity { // others hold none, so all is known
		r.answer.State.Parts, r.acquired = all, acquired{}
	}
}
