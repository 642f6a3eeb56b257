package store

import (
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
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

// history is a kind of random history.
type history struct {
	draw      func(buckettest.Source) bucket.Terms
	decides   bool // statements decide on all rows
	revisions bool // the policies change by revisions; otherwise they change in the code
	busy      bool // no bucket is idle for a period, so that a window drops its oldest totals
}

// twin is a bucket that exists twice.
type twin struct {
	key       string
	terms     bucket.Terms
	list      []bucket.Revision // nil: no revisions
	revisions *bucket.Revisions
	row       bucket.State // as last found
}

// twins are buckets that exist twice. Statements decide on one of the two, and Go decides on the locked row of the
// other.
type twins struct {
	history

	src     buckettest.Seeded
	pool    *pgxpool.Pool
	session *Session
	now     int64
	buckets []*twin

	calls, byStatement, trimmed int
	general                     bool // a row is of a wrong clock, or of a window of another plan: Go may decide
}

func drawWindow(src buckettest.Source) bucket.Terms {
	return sliding(buckettest.One(src, 1, 3, 10, 0.1, 1e6/3), buckettest.One[int64](src, 1, 3, 5000, 16_667, 1_000_000), buckettest.One[int32](src, 1, 2, 10, 60, 128))
}

// TestFunctionsAgree runs random histories of calls for one bucket or several, alone, in a batch, and in transactions
// of each isolation level. They have costs that round, rows that others have written, clocks that step back, and
// policies that change. Every decision, value, ts and slice of the functions in the server and of the algebra in Go is
// the same to the last bit.
func TestFunctionsAgree(t *testing.T) {
	t.Parallel()
	testkit.EachSeed(t, func(t *testing.T, seed uint64) {
		t.Helper()
		for name, kind := range map[string]history{
			"Everyday":         {draw: buckettest.Everyday, decides: true},
			"Extreme":          {draw: buckettest.Extreme, decides: true},
			"EverydayOverEras": {draw: buckettest.Everyday, revisions: true},
			"Shifts":           {draw: buckettest.Shifts},
			"Windows":          {draw: drawWindow},
			"WindowsOverEras":  {draw: drawWindow, revisions: true},
			"BusyWindows":      {draw: func(buckettest.Source) bucket.Terms { return sliding(10, 5000, 10) }, busy: true},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				h := &twins{history: kind, src: buckettest.Seeded{Rand: rand.New(rand.NewPCG(seed, 0))}, pool: postgrestest.New(t), now: opening - buckettest.Minute}
				h.session = newSession(h.pool, func() *int64 { return new(h.now) })
				for i := range 3 {
					h.buckets = append(h.buckets, &twin{key: fmt.Sprint("key ", i)})
					h.redraw(h.buckets[i])
				}
				steps := testkit.Sized(200, 800)
				if h.busy {
					steps = 800 // a row drops totals once in some fifty
				}
				for range steps {
					h.step(t)
				}
				if !h.revisions {
					require.Greater(t, h.byStatement, h.calls/4)
				}
				if h.busy {
					require.Positive(t, h.trimmed)
				}
			})
		}
	})
}

// redraw draws the policies of a bucket.
func (h *twins) redraw(b *twin) {
	if b.terms = h.draw(h.src); h.revisions {
		b.list = buckettest.DrawRevisions(h.src, h.draw)
		b.revisions = bucket.NewRevisions(b.list)
	}
}

// at returns the terms of the bucket that hold at an instant.
func (b *twin) at(now int64) bucket.Terms {
	if b.revisions != nil {
		return b.revisions.Holding(now)
	}
	return b.terms.On(now)
}

// step makes one call on both twins.
func (h *twins) step(t *testing.T) {
	t.Helper()
	first := h.src.Pick(len(h.buckets))
	b := h.buckets[first]
	h.advance(b)
	if h.src.Pick(25) == 0 {
		h.disturb(t, b)
	}
	if h.src.Pick(40) == 0 && !h.revisions && !h.busy {
		h.redraw(b)
	}
	var fast, general []bucket.Ask
	resolved := h.now
	h.general = false
	if h.src.Pick(3) == 0 { // what a process takes to be the instant
		resolved += int64((h.src.Unit()*2 - 1) * float64(buckettest.Day))
	}
	for i := range 1 + h.src.Pick(3)/2*h.src.Pick(3) {
		b := h.buckets[(first+i)%len(h.buckets)]
		a := h.ask(b, b.at(resolved))
		h.general = h.general || a.Terms.IsQuota() && b.row.Capacity != a.Terms.Capacity || a.Terms.FromFuture(b.row, h.now)
		fast, general = append(fast, a), append(general, a)
		fast[i].Key.Name, general[i].Key.Name = "fast", "general"
	}
	fast, general = asking("", fast...).Asks, asking("", general...).Asks
	h.call(t, fast, general)
	for _, b := range h.buckets {
		h.compare(t, b)
	}
}

// ask returns an ask for as many tokens as the bucket just has, for a few more, or for any other number that it can
// give.
func (h *twins) ask(b *twin, terms bucket.Terms) bucket.Ask {
	now := terms.At(h.now)
	a := bucket.Ask{Key: bucket.Key{Key: b.key}, Terms: terms, MinBalance: -min(terms.MaxDebt, now.MaxDebt) * float64(h.src.Pick(2))}
	room := buckettest.Tokens(now, now.Carry(b.row), h.now) - a.MinBalance
	most := min(terms.Capacity, now.Capacity) - a.MinBalance
	switch h.src.Pick(8) {
	case 0:
		a.Cost = buckettest.One(h.src, room, math.Nextafter(room, math.Inf(1)))
	case 1, 2:
		a.Cost = room * h.src.Unit() * 2
	case 3:
		a.Cost = terms.Capacity / 16
	default:
		a.Cost = most * h.src.Unit() * buckettest.One(h.src, 1, 0.3, 0.05)
	}
	if !buckettest.Possible(terms, a.Cost, a.MinBalance) || !buckettest.Possible(now, a.Cost, a.MinBalance) {
		a.Cost = 0
	}
	if a.MinBalance < 0 && h.src.Pick(3) == 0 {
		wait := max(buckettest.Wait(now, now.Kind.Charge(now, now.FixClock(now.Carry(b.row), h.now), h.now, a.Cost), h.now, 0, 0), time.Millisecond)
		a.MaxWait = buckettest.One(h.src, wait, wait-time.Microsecond, time.Duration(h.src.Unit()*2*float64(wait)).Truncate(time.Microsecond)+time.Microsecond)
	}
	return a
}

// advance moves the clock, mostly to an instant just before a change of b, and sometimes back.
func (h *twins) advance(b *twin) {
	terms, before := b.at(h.now), h.now
	period, rest := float64(buckettest.Period(terms)), terms.Begin(h.now)+terms.Step-h.now
	switch h.src.Pick(12) {
	case 0:
	case 1:
		h.now++
	case 2, 3:
		h.now += int64(h.src.Unit() * 3 * period / max(terms.Rate, 1))
	case 4:
		h.now += int64(h.src.Unit() * 2 * period)
	case 5:
		h.now += rest - int64(h.src.Pick(2))
	case 6:
		h.now += buckettest.Wait(terms, b.row, h.now, h.src.Unit()*terms.Capacity, 0).Microseconds() - int64(h.src.Pick(2))
	case 7:
		h.now -= int64(h.src.Unit() * float64(buckettest.Minute))
	case 8: // back to the end of the tolerance
		h.now = b.row.TS - buckettest.Minute + int64(h.src.Pick(4)-1)
	case 9:
		if h.revisions {
			if from := buckettest.One(h.src, b.list...).From; from > math.MinInt64 {
				h.now = from + int64(h.src.Pick(3)-1)
			}
		}
	default:
		h.now += int64(h.src.Unit() * 3 * float64(terms.Step))
	}
	switch year := time.UnixMicro(h.now).Year(); {
	case h.busy:
		h.now = before + int64((h.src.Unit()*4-0.5)*float64(terms.Step))
	case h.revisions: // a clock that steps back shows whether a full row has been written
		h.now = max(h.now, before)
	case year < 1000 || year > 4000:
		h.now = opening
	}
}

// disturb writes both rows as another kind of limit, an older program or a wrong clock would.
func (h *twins) disturb(t *testing.T, b *twin) {
	t.Helper()
	const larger = `taken = taken[:2] || ARRAY(SELECT total + 40e6 FROM unnest(taken[3:]) WITH ORDINALITY AS u (total, at) ORDER BY at)`
	capacity, future := b.at(h.now).Capacity, h.now+buckettest.Minute+b.at(h.now).Step
	value := buckettest.One(h.src, 0, capacity, 2*capacity+1, -capacity-1, -1, 1e300, -1e300, math.MaxFloat64, -math.MaxFloat64, 5e-324)
	ts := buckettest.One(h.src, h.now, h.now-buckettest.Minute, future, future+1, bucket.MinInstant, bucket.MaxInstant)
	of := buckettest.One(h.src, capacity, capacity, 2*capacity+1, capacity/2, 0) // of another plan
	statements := []string{larger, `value = value / 2`, `value = value + 1`, `taken = NULL`, `ts = ts + 7200000000`}
	if h.revisions { // rows of another revision
		statements = statements[1:3]
	}
	set := buckettest.One(h.src, statements...)
	var err error
	switch chance := h.src.Pick(3); {
	case h.busy:
		_, err = h.pool.Exec(t.Context(), `UPDATE ratelimit.buckets SET `+larger+` WHERE key = $1`, b.key)
	case h.revisions || chance == 0:
		_, err = h.pool.Exec(t.Context(), `UPDATE ratelimit.buckets SET `+set+` WHERE key = $1`, b.key)
	case chance == 1:
		_, err = h.pool.Exec(t.Context(), `DELETE FROM ratelimit.buckets WHERE key = $1`, b.key)
	default:
		_, err = h.pool.Exec(t.Context(), `INSERT INTO ratelimit.buckets SELECT name, $1, 0, $2, $3, $4 FROM unnest(ARRAY['fast', 'general']) AS name
			ON CONFLICT (name, key, shard) DO UPDATE SET value = excluded.value, ts = excluded.ts, capacity = excluded.capacity`, b.key, value, ts, of)
	}
	require.NoError(t, err)
	h.compare(t, b)
}

// call fills the buckets, changes what they hold, or takes from them.
func (h *twins) call(t *testing.T, fast, general []bucket.Ask) {
	t.Helper()
	switch chance := h.src.Pick(12); {
	case chance == 0:
		require.NoError(t, h.session.Fill(t.Context(), fast))
		h.session.changeInGo(t, h.pool, general, func(p *bucket.Ledger) { p.Fill(general) })
	case chance <= 2:
		h.charge(t, fast, general)
	case !bucket.AllCostless(fast):
		h.take(t, fast, general)
	}
}

// charge charges the buckets twice, gives back to them, or does one after the other.
func (h *twins) charge(t *testing.T, fast, general []bucket.Ask) {
	t.Helper()
	charges := make([]Charge, 1+h.src.Pick(2))
	for n := range charges {
		charges[n] = Charge{Asks: fast, Amounts: make([]float64, len(fast)), Taken: make([]int64, len(fast))}
		for i := range fast {
			terms := fast[i].Terms
			fast[i].CreditCap = buckettest.One(h.src, 0, 0, 2*terms.Capacity)
			charges[n].Amounts[i] = fast[i].Cost * float64(h.src.Pick(3)-1)
			charges[n].Taken[i] = buckettest.One(h.src, bucket.Whenever, h.now, h.now-int64(h.src.Unit()*3*float64(buckettest.Period(terms))))
			general[i].CreditCap = fast[i].CreditCap
		}
	}
	h.session.changeInGo(t, h.pool, general, func(p *bucket.Ledger) {
		for _, c := range charges {
			for i := range general {
				p.Charge(&general[i], c.Amounts[i], c.Taken[i])
			}
		}
	})
	if h.src.Pick(2) == 0 {
		require.NoError(t, h.session.Charge(t.Context(), charges...))
		return
	}
	isolation := buckettest.One(h.src, pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable)
	require.NoError(t, pgx.BeginTxFunc(t.Context(), h.pool, pgx.TxOptions{IsoLevel: isolation}, func(tx pgx.Tx) error {
		in := h.session.InTx(tx, owner{h.pool}, nil)
		return in.Charge(t.Context(), charges...)
	}))
}

// take takes by statements, and in Go.
func (h *twins) take(t *testing.T, fast, general []bucket.Ask) {
	t.Helper()
	want := h.session.takeInGo(t, h.pool, general)
	call := taking(fast...)
	chosen := call.way
	batched := h.src.Pick(4) == 0 && fast[0].MinBalance == 0
	switch {
	case batched:
		require.Empty(t, runBatch(t, h.session, call))
		require.NoError(t, call.Result())
	case h.src.Pick(3) == 0:
		require.NoError(t, h.session.Decide(t.Context(), call))
	default:
		isolation := buckettest.One(h.src, pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable)
		require.NoError(t, pgx.BeginTxFunc(t.Context(), h.pool, pgx.TxOptions{IsoLevel: isolation}, func(tx pgx.Tx) error {
			in := h.session.InTx(tx, owner{h.pool}, nil)
			return in.Decide(t.Context(), call)
		}))
	}
	if !batched && !slices.ContainsFunc(fast, func(a bucket.Ask) bool { return a.MaxWait > 0 }) {
		h.calls++
	}
	if !batched && call.way == byStatement {
		h.byStatement++
	}
	if h.decides && !h.general && chosen == byStatement {
		require.Equal(t, chosen, call.way, "%+v at %d: %+v", fast, h.now, call.Answers)
	}
	got := call.Answers
	require.Equal(t, bucket.AllAllowed(want), bucket.AllAllowed(got), "%+v at %d: %+v, and in Go %+v", fast, h.now, got, want)
	for i := range got {
		require.Equal(t, want[i].Allowed, got[i].Allowed, "%+v at %d: %+v, and in Go %+v", fast, h.now, got, want)
		require.Equal(t, want[i].Now, got[i].Now)
		if terms := fast[i].Terms; !h.revisions && !want[i].Allowed {
			one, other := terms.FixClock(got[i].State, h.now), terms.FixClock(want[i].State, h.now)
			require.Equal(t, [2]any{other.Value, other.TS}, [2]any{one.Value, one.TS}, "%+v at %d", fast, h.now)
		}
		if bucket.AllAllowed(want) {
			require.True(t, want[i].State.Equal(fast[i].Terms.FixClock(got[i].State, h.now)), "%+v at %d: %+v, and in Go %+v", fast, h.now, got, want)
		}
	}
}

// compare compares the rows of both twins.
func (h *twins) compare(t *testing.T, b *twin) {
	t.Helper()
	rows, err := h.pool.Query(t.Context(), `SELECT value, ts, capacity, taken FROM ratelimit.buckets WHERE key = $1 ORDER BY name`, b.key)
	require.NoError(t, err)
	states, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (s bucket.State, err error) {
		s.Parts = &bucket.Parts{}
		return s, row.Scan(&s.Value, &s.TS, &s.Capacity, &s.Parts.Taken)
	})
	require.NoError(t, err)
	before := b.row
	if b.row = b.at(h.now).Full(h.now); len(states) == 0 {
		return
	}
	require.Len(t, states, 2)
	require.True(t, states[0].Equal(states[1]), "%+v at %d: %+v, and in Go %+v", b.at(h.now), h.now, states[0], states[1])
	b.row = states[0]
	if totals := len(b.row.Parts.Taken); totals > 4 && before.Parts != nil && totals < len(before.Parts.Taken) {
		h.trimmed++
	}
}
