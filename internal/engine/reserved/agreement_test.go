package reserved

import (
	"context"
	"errors"
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
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
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

func (owner) ClockRepaired(context.Context, string) {}

func (owner) Batch(context.Context, *store.Call) (sent bool, err error) { return false, nil }

func (owner) Batched(context.Context, int, time.Duration) {}

// shelf is a bucket of a book.
type shelf struct {
	key       bucket.Key
	terms     bucket.Terms
	list      []bucket.Revision
	revisions *bucket.Revisions // nil: the terms change in the code
}

// book are buckets, reservations of several of them, and the clock.
type book struct {
	src          buckettest.Seeded
	pool         *pgxpool.Pool
	session      *store.Session
	draw         func(buckettest.Source) bucket.Terms
	overRevision bool
	shelves      []*shelf
	now          int64
	ids          []string // of open reservations
	ended        []string

	refused         int
	single, several counts // of calls for one bucket, and for several
}

// counts are numbers of calls, and of those that a function for them has decided.
type counts struct{ all, byStatement int }

func (c *counts) add(byStatement bool) {
	if c.all++; byStatement {
		c.byStatement++
	}
}

// TestReservationsAgree runs random histories of calls on reservations of one bucket, which reserve_1 and settle_1
// decide, and of several, alone and in transactions of each isolation level, beside clocks that step back and rows that
// others have changed. After each call the buckets and the reservation are as package bucket and this package compute
// them, to the last bit, whoever has decided.
func TestReservationsAgree(t *testing.T) {
	t.Parallel()
	testkit.EachSeed(t, func(t *testing.T, seed uint64) {
		t.Helper()
		for name, kind := range map[string]struct {
			draw      func(buckettest.Source) bucket.Terms
			revisions bool
		}{
			"Everyday": {buckettest.Everyday, false}, "Extreme": {buckettest.Extreme, false}, "EverydayOverEras": {buckettest.Everyday, true},
			"Shifts": {buckettest.Shifts, false},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				h := &book{src: buckettest.Seeded{Rand: rand.New(rand.NewPCG(seed, 0))}, pool: postgrestest.New(t), draw: kind.draw, overRevision: kind.revisions}
				s := store.New(store.Options{Schema: store.DefaultSchema, AsOf: func() *int64 { return new(h.now) }}).OnPool(h.pool, owner{h.pool})
				h.session, h.now = &s, buckettest.Opening-buckettest.Minute
				for i := range 3 {
					h.shelves = append(h.shelves, &shelf{key: bucket.Key{Name: fmt.Sprint("limit ", i), Key: "key"}})
				}
				for n := range testkit.Sized(300, 1500) {
					if n%60 == 0 {
						h.redraw()
					}
					h.step(t)
				}
				require.Positive(t, h.refused)
				require.Greater(t, h.single.byStatement, h.single.all/2)
				require.Greater(t, h.several.byStatement, h.several.all/2)
			})
		}
	})
}

// redraw draws the policies.
func (h *book) redraw() {
	for _, b := range h.shelves {
		if b.terms, b.revisions = h.draw(h.src), nil; h.overRevision {
			b.list = buckettest.DrawRevisions(h.src, h.draw)
			b.revisions = bucket.NewRevisions(b.list)
		}
	}
}

// at returns the terms that hold at an instant.
func (b *shelf) at(now int64) bucket.Terms {
	if b.revisions != nil {
		return b.revisions.Holding(now)
	}
	return b.terms.On(now)
}

func (h *book) step(t *testing.T) {
	t.Helper()
	b := buckettest.One(h.src, h.shelves...)
	terms := b.at(h.now)
	switch h.src.Pick(9) {
	case 0:
	case 1:
		h.now++
	case 2:
		h.now -= int64(h.src.Unit() * float64(buckettest.Minute))
	case 3:
		next := terms.Begin(h.now) + terms.Step
		if terms.Windows != nil {
			next = terms.Windows.Begin(terms.Windows.Index(h.now) + 1)
		}
		h.now = next - int64(h.src.Pick(2))
	case 4:
		if b.revisions != nil {
			if from := buckettest.One(h.src, b.list...).From; from > math.MinInt64 {
				h.now = from + int64(h.src.Pick(3)-1)
			}
		}
	default:
		h.now += int64(h.src.Unit() * 2 * float64(buckettest.Period(terms)) * buckettest.One(h.src, 1, 0.01))
	}
	if year := time.UnixMicro(h.now).Year(); year < 1971 || year > 4000 {
		h.now = buckettest.Opening
	}
	if h.src.Pick(20) == 0 {
		_, err := h.pool.Exec(t.Context(), buckettest.One(h.src, `DELETE FROM ratelimit.buckets`, `UPDATE ratelimit.buckets SET value = value / 2`,
			`UPDATE ratelimit.buckets SET ts = ts + 7200000000`, `UPDATE ratelimit.buckets SET capacity = capacity + 1`))
		require.NoError(t, err)
	}
	switch {
	case len(h.ids) == 0 || h.src.Pick(3) == 0:
		h.reserve(t)
	case h.src.Pick(3) == 0:
		h.renew(t)
	case h.src.Pick(4) == 0:
		h.start(t)
	default:
		h.end(t)
	}
}

// byNow gives reservations the terms of the book, or their own.
type byNow struct {
	h   *book
	own bool
}

func (o byNow) Resolve(_ context.Context, _ string, r *Reservation) {
	for i := range r.Buckets {
		if o.own {
			r.Buckets[i].Now = r.Buckets[i].Terms()
			continue
		}
		for _, b := range o.h.shelves {
			if b.key == r.Buckets[i].Key {
				r.Buckets[i].Now = b.at(o.h.now)
			}
		}
	}
}

func (byNow) Changed([]bucket.Ask)                           {}
func (byNow) Ended(context.Context, *Reservation, []float64) {}

// life returns the operations on reservations.
func (h *book) life(s *store.Session) *Life {
	return &Life{Session: s, Owner: byNow{h: h}, ExpireAfter: time.Hour, ErrTooMuch: errTooMuch}
}

var errTooMuch = errors.New("too much")

// end settles a reservation, cancels it, or lets it expire.
func (h *book) end(t *testing.T) {
	t.Helper()
	i := h.src.Pick(len(h.ids))
	id := h.ids[i]
	h.ids, h.ended = slices.Delete(h.ids, i, i+1), append(h.ended, id)
	want := h.reservation(t, id)
	if h.src.Pick(4) > 0 {
		h.settle(t, want)
		return
	}
	byNow{h: h}.Resolve(t.Context(), "", want)
	final, amounts := buckettest.One(h.src, Settled, Settled, Cancelled, Expired), want.Released()
	switch final {
	case Cancelled:
		amounts = want.Credit()
	case Settled:
		for i := range amounts {
			cost := want.Buckets[i].Cost * buckettest.One(h.src, 0, 0.5, 1, 1, 1.5, h.src.Unit(), 3*h.src.Unit())
			amounts[i] = cost - want.Buckets[i].Cost
		}
	}
	p := h.charged(t, want, amounts)
	if want.State, want.ExpiresUs = final, max(want.ExpiresUs, h.now); final == Settled {
		want.settle(amounts)
	}
	h.in(t, func(s *store.Session) error {
		life := h.life(s)
		r, err := life.Lock(t.Context(), "settle", id)
		if err != nil || final == Expired {
			if err == nil {
				err = life.Expire(t.Context(), r)
			}
			return err
		}
		return life.End(t.Context(), r, final, func(*Reservation) ([]float64, error) { return amounts, nil })
	})
	h.requireRows(t, p, fmt.Sprintf("%s with %v", final, amounts))
	h.requireStored(t, want)
}

// settle settles a reservation, or cancels it, by settle_1 or settle_costs_1 if that decides.
func (h *book) settle(t *testing.T, want *Reservation) {
	t.Helper()
	byNow{h: h}.Resolve(t.Context(), "", want)
	q := store.Settlement{ID: want.ID, Final: Settled, Several: len(want.Buckets) > 1}
	chance := h.src.Pick(5)
	own := chance == 2 && !h.overRevision && !slices.ContainsFunc(want.Buckets, func(b Reserved) bool { return b.Now.Windows != nil })
	amounts, actual := make([]float64, len(want.Buckets)), make([]*float64, len(want.Buckets))
	for i := range want.Buckets {
		b := &want.Buckets[i]
		c := store.ActualCost{Key: b.Key, Free: h.src.Pick(2) == 0, Own: own}
		c.Cost = b.Cost * buckettest.One(h.src, 0, 0.5, 1, 1.5, 3, h.src.Unit(), 3*h.src.Unit())
		if c.Terms = new(b.Now); own {
			b.Now, c.Terms = b.Terms(), nil
		}
		switch {
		case chance == 0:
			q.Final, c.Cost, c.Free = Cancelled, 0, false
		case chance == 1, q.Several && h.src.Pick(4) == 0: // it keeps its cost
			continue
		case c.Free:
			actual[i] = new(min(c.Cost, b.Cost))
		default:
			actual[i] = new(c.Cost)
		}
		if q.Costs = append(q.Costs, c); actual[i] != nil {
			amounts[i] = *actual[i] - b.Cost
		} else {
			amounts[i] = -b.Cost
		}
	}
	if !q.Several && len(q.Costs) > 0 {
		c := &q.Costs[0]
		q.Bucket, q.Cost, q.Free, q.Own, q.Terms = &c.Key, &c.Cost, c.Free, c.Own, c.Terms
	}
	p := h.charged(t, want, amounts)
	if want.State, want.ExpiresUs = q.Final, max(want.ExpiresUs, h.now); q.Final == Settled {
		want.settle(amounts)
	}
	for i := range actual {
		if actual[i] != nil {
			want.Buckets[i].Settled = actual[i]
		}
	}
	calls := &h.single
	if q.Several {
		calls = &h.several
	}
	h.in(t, func(s *store.Session) error {
		err := s.Settle(t.Context(), &q)
		if err != nil || q.Ended.Done {
			require.Equal(t, Open, q.Ended.State)
			require.Equal(t, amounts[0], q.Ended.Amount)
			for i, c := range q.Ended.Others {
				require.Equal(t, store.Charged{Key: want.Buckets[i+1].Key, Amount: amounts[i+1]}, c)
			}
			calls.add(true)
			return err
		}
		calls.add(false)
		return s.RetryTx(t.Context(), "settle", func(tx *store.Session) error {
			life := h.life(tx)
			life.Owner = byNow{h, own}
			r, err := life.Lock(t.Context(), "settle", want.ID)
			require.NoError(t, err)
			return life.End(t.Context(), r, q.Final, func(r *Reservation) ([]float64, error) {
				for i := range actual {
					r.Buckets[i].Settled = actual[i]
				}
				return amounts, nil
			})
		})
	})
	h.requireRows(t, p, fmt.Sprintf("%s with %v", q.Final, amounts))
	h.requireStored(t, want)
	require.NoError(t, h.session.Settle(t.Context(), &q))
	require.Equal(t, [2]any{true, q.Final}, [2]any{q.Ended.Done, q.Ended.State}, "again")
	if !q.Several {
		require.Equal(t, store.Ended{Done: true, State: q.Final, Key: want.Buckets[0].Key, Plan: want.Buckets[0].Plan}, q.Ended, "again")
	}
}

// charged returns a ledger with amounts charged to the buckets of a reservation.
func (h *book) charged(t *testing.T, r *Reservation, amounts []float64) *bucket.Ledger {
	t.Helper()
	var charge store.Charge
	for i, all := 0, r.Charge(amounts); i < len(amounts); i++ {
		if amounts[i] != 0 { // of the others no call reads the rows
			charge.Add(all.Asks[i], all.Amounts[i], all.Taken[i])
		}
	}
	p := h.ledger(t, charge.Asks)
	for i := range charge.Asks {
		p.Charge(&charge.Asks[i], charge.Amounts[i], charge.Taken[i])
	}
	return p
}

// requireStored compares a reservation with its row. If windows differ in length, two of their steps may hold at an
// instant, which say the same about it: the server may keep the one that also holds at the row's ts.
func (h *book) requireStored(t *testing.T, want *Reservation) {
	t.Helper()
	stored := h.reservation(t, want.ID)
	for i := range want.Buckets {
		b := &want.Buckets[i]
		if b.Now = (bucket.Terms{}); b.Calendar != "" {
			b.StepUs, b.PhaseUs = stored.Buckets[i].StepUs, stored.Buckets[i].PhaseUs
		}
	}
	want.NowUs = stored.NowUs
	require.Equal(t, want, stored, "at %d", h.now)
}

// renew renews a reservation, or starts one that has lost its turn.
func (h *book) renew(t *testing.T) {
	t.Helper()
	want := h.reservation(t, buckettest.One(h.src, h.ids...))
	byNow{h: h}.Resolve(t.Context(), "", want)
	asks := want.Asks()
	for i := range asks {
		if !(asks[i].Terms.Capacity-asks[i].Cost >= asks[i].MinBalance) {
			return
		}
	}
	starts := h.isStale(want)
	p := h.ledger(t, asks)
	answers := p.Take(asks, nil)
	if allowed := bucket.AllAllowed(answers); allowed {
		for i := range asks {
			want.Buckets[i].Now = asks[i].Terms
		}
		if want.reopen(ReadyAt(asks, answers, 0)); starts && want.ReadyUs <= answers[0].Now {
			want.StartedUs = &answers[0].Now
		}
	}
	h.in(t, func(s *store.Session) error {
		life := h.life(s)
		var turn Turn
		var err error
		if starts {
			turn, err = life.Start(t.Context(), want.ID, h.paused(0), nil)
		} else {
			turn, err = life.Renew(t.Context(), want.ID)
		}
		require.Equal(t, want.ReadyUs, turn.ReadyUs)
		return err
	})
	h.requireRows(t, p, "renew")
	h.requireStored(t, want)
}

// isStale reports whether a reservation has lost its turn.
func (h *book) isStale(r *Reservation) bool {
	return (r.State == Open || r.State == Expired) && r.StaleUs != nil && r.StartedUs == nil && h.now >= *r.StaleUs
}

// paused returns the end of a pause as Start takes it: an unknown one is looked up, and there is none.
func (h *book) paused(until int64) *int64 {
	if until == 0 && h.src.Pick(2) == 0 {
		return nil
	}
	return &until
}

// start starts a reservation that keeps its turn, open or not.
func (h *book) start(t *testing.T) {
	t.Helper()
	want := h.reservation(t, buckettest.One(h.src, slices.Concat(h.ids, h.ended)...))
	if want.NowUs = h.now; h.isStale(want) || want.State == Expired && want.Release {
		return
	}
	want.PausedUntil = buckettest.One(h.src, 0, h.now-1, h.now, h.now+1e6)
	turn, err := h.life(nil).turnOf(t.Context(), want, false)
	h.in(t, func(s *store.Session) error {
		got, gotErr := h.life(s).Start(t.Context(), want.ID, h.paused(want.PausedUntil), nil)
		if require.Equal(t, err, gotErr); err == nil {
			require.Equal(t, [3]any{turn.Wait, turn.Restarted, turn.StartedUs}, [3]any{got.Wait, got.Restarted, got.StartedUs})
		}
		return nil
	})
	want.PausedUntil = 0
	h.requireStored(t, want)
}

// ledger returns the ledger on which Go decides.
func (h *book) ledger(t *testing.T, asks []bucket.Ask) *bucket.Ledger {
	t.Helper()
	p := bucket.NewLedger(asks)
	p.Now = h.now
	for i := range p.Rows {
		var s bucket.State
		k := p.Rows[i].Key
		err := h.pool.QueryRow(t.Context(), `SELECT value, ts, capacity FROM ratelimit.buckets WHERE name = $1 AND key = $2`, k.Name, k.Key).
			Scan(&s.Value, &s.TS, &s.Capacity)
		if err != nil {
			require.ErrorIs(t, err, pgx.ErrNoRows)
			s = p.Rows[i].Terms.Full(h.now)
		}
		p.Put(i, s, err != nil)
	}
	p.SetNow(asks)
	p.Settle(asks)
	return p
}

// in runs call alone, or in a transaction.
func (h *book) in(t *testing.T, call func(s *store.Session) error) {
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

// requireRows compares the rows that have changed with those of a ledger.
func (h *book) requireRows(t *testing.T, p *bucket.Ledger, of string) {
	t.Helper()
	p.Changes(func(k bucket.Key, want bucket.State) {
		var got bucket.State
		require.NoError(t, h.pool.QueryRow(t.Context(), `SELECT value, ts, capacity FROM ratelimit.buckets WHERE name = $1 AND key = $2`, k.Name, k.Key).
			Scan(&got.Value, &got.TS, &got.Capacity))
		require.Equal(t, [3]any{want.Value, want.TS, want.Capacity}, [3]any{got.Value, got.TS, got.Capacity}, "%s: %s at %d", of, k.Name, h.now)
	})
}

// reservation returns the row of a reservation.
func (h *book) reservation(t *testing.T, id string) *Reservation {
	t.Helper()
	r := &Reservation{ID: id}
	require.NoError(t, h.session.RetryTx(t.Context(), "", func(tx *store.Session) (err error) {
		r, err = Tables{}.LockReservation(t.Context(), &tx.Unit, id, false)
		return err
	}))
	r.known, r.others = nil, nil
	return r
}

func (h *book) reserve(t *testing.T) {
	t.Helper()
	resolved := h.now
	if h.src.Pick(3) == 0 { // what a process takes to be the instant
		resolved += int64((h.src.Unit()*2 - 1) * float64(buckettest.Day))
	}
	shelves := h.shelves
	if h.src.Pick(2) == 0 {
		i := h.src.Pick(len(shelves))
		shelves = shelves[i : i+1]
	}
	var asks []bucket.Ask
	for _, b := range shelves {
		terms := b.at(resolved)
		a := bucket.Ask{Key: b.key, Terms: terms, MinBalance: -terms.MaxDebt, AllowDebt: true, Unenforced: h.src.Pick(5) == 0}
		a.Cost = (terms.Capacity + min(terms.MaxDebt, 3*terms.Capacity+terms.Rate)) * h.src.Unit() * buckettest.One(h.src, 1, 0.5, 0.1)
		now := b.at(h.now)
		if h.src.Pick(4) > 0 && a.Cost > 0 && buckettest.Possible(terms, a.Cost, a.MinBalance) && buckettest.Possible(now, a.Cost, -now.MaxDebt) {
			asks = append(asks, a)
		}
	}
	if len(asks) == 0 {
		return
	}
	keep := Keeping{
		StaleAfter: time.Duration(h.src.Pick(2)) * time.Minute, ExpireAfter: time.Hour, Release: h.src.Pick(2) == 0,
		NotBefore: h.now + int64(h.src.Pick(3)-1)*1e6, Plans: slices.Repeat([]string{buckettest.One(h.src, "", "pro")}, len(asks)),
	}
	model := slices.Clone(asks)
	p := h.ledger(t, model)
	answers := p.Take(model, nil)
	c := store.Call{Question: store.Question{Verb: "reserve", Asks: asks, Reserve: &keep}}
	h.in(t, func(s *store.Session) error { return s.Decide(t.Context(), &c) })
	h.requireRows(t, p, "reserve")
	for i := range answers {
		require.Equal(t, answers[i].Allowed, c.Answers[i].Allowed, "%d: %+v at %d", i, asks[i], h.now)
	}
	if !bucket.AllAllowed(answers) {
		h.refused++
		require.Nil(t, c.Record)
		return
	}
	got, _ := c.Record.(*Reservation)
	want, _ := keep.Record(model, answers).(*Reservation)
	if len(asks) == 1 {
		h.single.add(len(got.Buckets) == 0)
	}
	stored := h.reservation(t, got.ID)
	require.Equal(t, [2]any{stored.ReadyUs, stored.StaleUs}, [2]any{got.ReadyUs, got.StaleUs})
	want.ID = stored.ID
	h.requireStored(t, want)
	h.ids = append(h.ids, got.ID)
}

// No test leaves a goroutine behind.
func TestMain(m *testing.M) { testkit.Main(m) }
