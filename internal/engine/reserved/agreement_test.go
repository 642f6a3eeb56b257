package reserved

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/engine/store"
	"github.com/pgratelimit/pgratelimit/internal/test/leaktest"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testsize"
)

// owner begins transactions on a pool, and makes no failed attempt again.
type owner struct{ *pgxpool.Pool }

func (o owner) InOwnTx(ctx context.Context, from *store.Session, fn func(tx *store.Session) error) error {
	return pgx.BeginTxFunc(ctx, o.Pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		bound := from.BoundTo(tx, o)
		return fn(&bound)
	})
}

func (o owner) Once(ctx context.Context, claim func() bool, statement func(context.Context, store.Conn) error) (ran bool, err error) {
	if claim != nil && !claim() {
		return false, context.Canceled
	}
	return true, statement(ctx, o.Pool)
}

func (owner) Retry(_ context.Context, _ string, err error, _ func() error) error { return err }

func (owner) Mended(context.Context, string) {}

func (owner) Batched(context.Context, int, time.Duration) {}

// ledger is a bucket and its reservations, and the clock.
type ledger struct {
	src     buckettest.Seeded
	pool    *pgxpool.Pool
	session *store.Session
	draw    func(buckettest.Source) bucket.Terms
	eras    *bucket.Eras // nil: the terms change in the code
	list    []bucket.Era
	terms   bucket.Terms
	now     int64
	open    []string

	calls, byStatement int
}

// TestReserveAndSettleAgree runs random histories of reserve_1 and settle_1, alone and in transactions of each
// isolation level, on one bucket whose policy changes, beside clocks that step back and rows that others have changed.
// After each call the bucket and the reservation are as package bucket and this package compute them, to the last bit,
// whoever has decided.
func TestReserveAndSettleAgree(t *testing.T) {
	t.Parallel()
	testsize.EachSeed(t, func(t *testing.T, seed uint64) {
		t.Helper()
		for name, kind := range map[string]struct {
			draw func(buckettest.Source) bucket.Terms
			eras bool
		}{
			"Everyday": {buckettest.Everyday, false}, "Extreme": {buckettest.Extreme, false}, "EverydayOverEras": {buckettest.Everyday, true},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				h := &ledger{src: buckettest.Seeded{Rand: rand.New(rand.NewPCG(seed, 0))}, pool: postgrestest.New(t), draw: kind.draw}
				s := store.New(store.Options{Schema: store.DefaultSchema, AsOf: func() *int64 { return new(h.now) }}).OnPool(h.pool, owner{h.pool})
				h.session, h.now = &s, buckettest.Opening-buckettest.Minute
				for n := range testsize.Of(300, 1500) {
					if n%60 == 0 {
						h.redraw(kind.eras)
					}
					h.step(t)
				}
				require.Greater(t, h.byStatement, h.calls/2)
			})
		}
	})
}

// redraw draws the policy.
func (h *ledger) redraw(overEras bool) {
	if h.terms, h.eras = h.draw(h.src), nil; overEras {
		h.list = buckettest.DrawEras(h.src, h.draw)
		h.eras = bucket.NewEras(h.list)
		h.now = max(h.now, buckettest.Opening-buckettest.Minute)
	}
}

// at returns the terms that hold at an instant.
func (h *ledger) at(now int64) bucket.Terms {
	if h.eras != nil {
		return h.eras.Holding(now)
	}
	return h.terms
}

func (h *ledger) step(t *testing.T) {
	t.Helper()
	terms := h.at(h.now)
	switch h.src.Pick(9) {
	case 0:
	case 1:
		h.now++
	case 2:
		h.now -= int64(h.src.Unit() * float64(buckettest.Minute))
	case 3:
		h.now = terms.Begin(h.now) + terms.Step - int64(h.src.Pick(2))
	case 4:
		if h.eras != nil {
			if from := buckettest.One(h.src, h.list...).From; from > math.MinInt64 {
				h.now = from + int64(h.src.Pick(3)-1)
			}
		}
	default:
		h.now += int64(h.src.Unit() * 2 * float64(buckettest.Period(terms)) * buckettest.One(h.src, 1, 0.01))
	}
	if year := time.UnixMicro(h.now).Year(); year < 1900 || year > 4000 {
		h.now = buckettest.Opening
	}
	if h.src.Pick(20) == 0 {
		_, err := h.pool.Exec(t.Context(), buckettest.One(h.src, `DELETE FROM ratelimit.buckets`, `UPDATE ratelimit.buckets SET value = value / 2`,
			`UPDATE ratelimit.buckets SET ts = ts + 7200000000`, `UPDATE ratelimit.buckets SET capacity = capacity + 1`))
		require.NoError(t, err)
	}
	if len(h.open) == 0 || h.src.Pick(3) == 0 {
		h.reserve(t)
		return
	}
	h.settle(t)
}

// row returns the row of the bucket.
func (h *ledger) row(t *testing.T) (s bucket.State, absent bool) {
	t.Helper()
	rows, err := h.pool.Query(t.Context(), `SELECT value, ts, capacity FROM ratelimit.buckets`)
	require.NoError(t, err)
	states, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (s bucket.State, err error) {
		return s, row.Scan(&s.Value, &s.TS, &s.Capacity)
	})
	require.NoError(t, err)
	if len(states) == 0 {
		return s, true
	}
	return states[0], false
}

// reservation returns the row of a reservation.
func (h *ledger) reservation(t *testing.T, id string) *Reservation {
	t.Helper()
	r := &Reservation{ID: id}
	require.NoError(t, h.session.RetryTx(t.Context(), "", func(tx *store.Session) (err error) {
		r, err = Tables{}.LockReservation(t.Context(), &tx.Unit, id, false)
		return err
	}))
	r.known, r.others = nil, nil
	return r
}

// page returns the page on which Go decides.
func (h *ledger) page(t *testing.T, asks []bucket.Ask) *bucket.Page {
	t.Helper()
	p := bucket.NewPage(asks)
	p.Now = h.now
	s, absent := h.row(t)
	if absent {
		s = asks[0].Terms.Full(h.now)
	}
	p.Put(0, s, absent)
	p.SetNow(asks)
	p.Settle(asks)
	return p
}

// in runs call alone, or in a transaction.
func (h *ledger) in(t *testing.T, call func(s *store.Session) error) {
	t.Helper()
	if h.src.Pick(2) == 0 {
		require.NoError(t, call(h.session))
		return
	}
	isolation := buckettest.One(h.src, pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable)
	require.NoError(t, pgx.BeginTxFunc(t.Context(), h.pool, pgx.TxOptions{IsoLevel: isolation}, func(tx pgx.Tx) error {
		in := h.session.InTx(tx, owner{h.pool}, nil)
		return call(&in)
	}))
}

// requireRow compares the row of the bucket with that of a page.
func (h *ledger) requireRow(t *testing.T, p *bucket.Page, a *bucket.Ask, of string) {
	t.Helper()
	if !p.HasChanged() {
		return
	}
	got, absent := h.row(t)
	require.False(t, absent)
	want := p.State(a)
	require.Equal(t, [3]any{want.Value, want.TS, want.Capacity}, [3]any{got.Value, got.TS, got.Capacity}, "%s at %d under %+v", of, h.now, a.Terms)
}

func (h *ledger) reserve(t *testing.T) {
	t.Helper()
	terms := h.at(h.now)
	a := bucket.Ask{Key: bucket.Key{Name: "limit", Key: "key"}, Terms: terms, Lowest: -terms.MaxOwed, MayOwe: true, Unenforced: h.src.Pick(5) == 0}
	room := terms.Capacity + min(terms.MaxOwed, 3*terms.Capacity+terms.Rate)
	a.Cost = room * h.src.Unit() * buckettest.One(h.src, 1, 0.5, 0.1)
	if !buckettest.Possible(terms, a.Cost, a.Lowest) || a.Cost == 0 {
		return
	}
	keep := Keeping{
		StaleAfter: time.Duration(h.src.Pick(2)) * time.Minute, ExpireAfter: time.Hour, Release: h.src.Pick(2) == 0,
		NotBefore: h.now + int64(h.src.Pick(3)-1)*1e6, Plans: []string{buckettest.One(h.src, "", "pro")},
	}
	model := []bucket.Ask{a}
	p := h.page(t, model)
	answers := p.Take(model, nil)
	c := store.Call{Question: store.Question{Verb: "reserve", Asks: []bucket.Ask{a}, Reserve: &keep}}
	h.in(t, func(s *store.Session) error { return s.Decide(t.Context(), &c) })
	h.calls++
	require.Equal(t, bucket.AllAllowed(answers), bucket.AllAllowed(c.Answers), "%+v at %d", a, h.now)
	if !answers[0].Allowed {
		require.Nil(t, c.Record)
		return
	}
	h.requireRow(t, p, &a, fmt.Sprintf("reserve %v", a.Cost))
	got, _ := c.Record.(*Reservation)
	want, _ := keep.Record(model, answers).(*Reservation)
	if len(got.Buckets) == 0 {
		h.byStatement++
	}
	stored := h.reservation(t, got.ID)
	require.Equal(t, [2]any{stored.ReadyUs, stored.StaleUs}, [2]any{got.ReadyUs, got.StaleUs})
	want.ID, want.NowUs = stored.ID, stored.NowUs
	require.Equal(t, want, stored, "%+v at %d: %+v", a, h.now, answers)
	h.open = append(h.open, got.ID)
}

// resolving gives reservations the terms of a limit.
type resolving struct{ terms bucket.Terms }

func (o resolving) Resolve(_ context.Context, _ string, r *Reservation) { r.Buckets[0].Now = o.terms }
func (resolving) Changed([]bucket.Ask)                                  {}
func (resolving) Ended(context.Context, *Reservation, []float64)        {}

func (h *ledger) settle(t *testing.T) {
	t.Helper()
	i := h.src.Pick(len(h.open))
	id := h.open[i]
	want := h.reservation(t, id)
	b := &want.Buckets[0]
	final, cost := Settled, new(b.Cost*buckettest.One(h.src, 0, 0.5, 1, 1.5, h.src.Unit(), 3*h.src.Unit()))
	terms := h.at(h.now)
	q := store.Settlement{ID: id, Final: final, Cost: cost, Bucket: &b.Key, Free: h.src.Pick(4) == 0, Terms: &terms}
	switch h.src.Pick(5) {
	case 0:
		q.Final, q.Cost, q.Bucket, q.Free = Cancelled, new(0.0), nil, false
	case 1:
		q.Cost, q.Bucket, q.Terms, q.Free = nil, nil, nil, false
	case 2:
		if h.eras == nil {
			q.Own, q.Terms = true, nil
			terms = b.Terms()
		}
	}
	amount := 0.0
	if q.Cost != nil {
		if q.Free {
			q.Cost = new(min(*q.Cost, b.Cost))
		}
		amount = *q.Cost - b.Cost
	}
	b.Now = terms
	charge := want.Charge([]float64{amount})
	p := h.page(t, charge.Asks)
	if amount != 0 {
		p.Charge(&charge.Asks[0], charge.Amounts[0], charge.Taken[0])
	}
	if want.State, want.ExpiresUs = q.Final, max(want.ExpiresUs, h.now); q.Final == Settled {
		want.settle([]float64{amount})
		if q.Cost != nil {
			b.Settled = q.Cost
		}
	}
	h.calls++
	h.in(t, func(s *store.Session) error {
		err := s.Settle(t.Context(), &q)
		e := q.Ended
		if err != nil || e.Done {
			require.Equal(t, Open, e.State)
			require.Equal(t, amount, e.Amount)
			h.byStatement++
			return err
		}
		return s.RetryTx(t.Context(), "settle", func(tx *store.Session) error {
			life := Life{Session: tx, Owner: resolving{terms}}
			r, err := life.Lock(t.Context(), "settle", id)
			require.NoError(t, err)
			return life.End(t.Context(), r, q.Final, func(r *Reservation) ([]float64, error) {
				if q.Final == Settled {
					r.Buckets[0].Settled = q.Cost
				}
				return []float64{amount}, nil
			})
		})
	})
	h.requireRow(t, p, &charge.Asks[0], fmt.Sprintf("settle %v with %v", b.Cost, amount))
	stored := h.reservation(t, id)
	b.Now = bucket.Terms{}
	require.Equal(t, want, stored)
	h.open = slices.Delete(h.open, i, i+1)
	err := h.session.Settle(t.Context(), &q)
	e := q.Ended
	require.NoError(t, err)
	require.Equal(t, store.Ended{Done: true, State: q.Final, Key: b.Key, Plan: b.Plan}, e, "again")
}

// No test leaves a goroutine behind.
func TestMain(m *testing.M) { leaktest.Main(m) }
