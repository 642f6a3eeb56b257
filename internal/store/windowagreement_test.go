//go:build !generalpath

package store

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// windowTwins is a sliding window that is there twice: statements decide on one, Go on the other.
type windowTwins struct {
	src           buckettest.Seeded
	db            database
	fast, general *Session
	terms         bucket.Terms
	eras          *bucket.Eras
	now           int64
	key           string
	neverIdle     bool      // for a period
	undisturbed   bool      // nothing else writes the rows
	before        []float64 // taken of the row

	byStatement, trimmed, lowered int
}

func drawWindow(src buckettest.Source) bucket.Terms {
	return sliding(buckettest.One(src, 1, 3, 10, 0.1, 1e6/3), buckettest.One[int64](src, 1, 3, 5000, 16_667, 1_000_000), buckettest.One[int32](src, 1, 2, 10, 60, 128))
}

// TestWindowStatementsAgree runs random histories of sliding windows by the statements, alone and in a transaction, and by locking
// and deciding in Go. They have costs that round, rows written by others, clocks that step back, and policies that change in the
// code and by eras. Half of them go on for so long that totals are dropped. Every decision, value, ts and slice agree to the last
// bit.
func TestWindowStatementsAgree(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	testsize.EachSeed(t, func(t *testing.T, seed uint64) {
		t.Helper()
		windowsAgree(t, pool, seed)
	})
}

func windowsAgree(t *testing.T, pool *pgxpool.Pool, seed uint64) {
	t.Helper()
	const calls = 120
	histories := testsize.Of(4, 6)
	byStatement, trimmed, lowered := 0, 0, 0
	for i := range uint64(histories) {
		h := &windowTwins{src: buckettest.Seeded{Rand: rand.New(rand.NewPCG(seed, i))}, db: pool, now: opening, key: fmt.Sprintf("key%d of %d", i, seed), neverIdle: i%2 == 1}
		clock := func() *int64 { now := h.now; return &now }
		h.fast, h.general = newSession(pool, clock), newSession(pool, clock)
		h.terms = drawWindow(h.src)
		switch i % 4 {
		case 0:
			h.eras = bucket.NewEras([]bucket.Era{
				{Terms: h.terms}, {From: opening + 20*h.terms.Step + 1, Terms: drawWindow(h.src), Change: buckettest.One(h.src, bucket.Keep, bucket.Scale, bucket.Reset)},
			})
		case 1:
			h.terms, h.undisturbed = sliding(10, 5000, 10), true // the oldest totals are dropped soon
		}
		for call := range calls {
			if call%20 == 19 && !h.neverIdle {
				h.write(t, largerTotals)
				h.look(t)
			}
			h.step(t)
		}
		byStatement, trimmed, lowered = byStatement+h.byStatement, trimmed+h.trimmed, lowered+h.lowered
	}
	t.Logf("statements decided %d of %d calls, dropped totals %d times and declined large ones %d times", byStatement, histories*calls, trimmed, lowered)
	require.Greater(t, byStatement, histories*calls/2)
	require.Positive(t, min(trimmed, lowered))
}

func (h *windowTwins) ask(name string, cost float64) bucket.Ask {
	a := bucket.Ask{Key: bucket.Key{Name: name, Key: h.key}, Terms: h.terms, Cost: cost}
	if h.eras != nil {
		a.Terms = h.eras.Holding(h.now - int64(h.src.Pick(2))*h.terms.Step)
	}
	return a
}

func (h *windowTwins) step(t *testing.T) {
	t.Helper()
	within, period, back := h.terms.Step, h.terms.Step*int64(h.terms.Steps), buckettest.Minute
	if h.neverIdle {
		within, period, back = 3*h.terms.Step, 2*h.terms.Step, h.terms.Step
	}
	switch h.src.Pick(10) {
	case 0:
		h.now += int64(h.src.Unit() * 2 * float64(period))
	case 1:
		if h.eras == nil {
			h.now -= int64(h.src.Unit() * float64(back))
		}
	case 2:
		h.now += int64(h.src.Pick(4)) * h.terms.Step
	case 3, 4:
	default:
		h.now += int64(h.src.Unit() * float64(within))
	}
	if h.eras == nil && !h.neverIdle && h.src.Pick(40) == 0 {
		h.terms = drawWindow(h.src)
	}
	if h.src.Pick(25) == 0 && !h.undisturbed {
		h.disturb(t)
	}
	cost := max(h.terms.Capacity*h.src.Unit()*buckettest.One(h.src, 1, 0.3, 0.05), h.terms.Capacity*1e-6)
	if h.src.Pick(4) == 0 {
		cost = h.terms.Capacity / 16
	}
	if h.eras != nil {
		cost = min(cost, h.eras.Holding(math.MaxInt64).Capacity)
	}
	h.take(t, cost)
	h.look(t)
}

const largerTotals = `UPDATE ratelimit.buckets SET taken = taken[:2] || ARRAY(SELECT total + 40e6 FROM unnest(taken[3:]) WITH ORDINALITY AS u (total, at) ORDER BY at) WHERE key = $1`

// disturb writes both rows as another kind of limit, an older program or a wrong clock would.
func (h *windowTwins) disturb(t *testing.T) {
	t.Helper()
	h.write(t, buckettest.One(h.src,
		`UPDATE ratelimit.buckets SET value = value / 2 WHERE key = $1`,
		`UPDATE ratelimit.buckets SET value = value + 1 WHERE key = $1`,
		largerTotals,
		`UPDATE ratelimit.buckets SET taken = NULL WHERE key = $1`,
		`UPDATE ratelimit.buckets SET ts = ts + 7200000000 WHERE key = $1`,
		`DELETE FROM ratelimit.buckets WHERE key = $1`))
}

func (h *windowTwins) write(t *testing.T, statement string) {
	t.Helper()
	_, err := h.db.Exec(t.Context(), statement, h.key)
	require.NoError(t, err)
}

// take takes by a statement and by locking.
func (h *windowTwins) take(t *testing.T, cost float64) {
	t.Helper()
	general := []bucket.Ask{h.ask("general", cost)}
	fast := []bucket.Ask{general[0]}
	fast[0].Key.Name = "fast"
	want, err := h.general.takeByLocking(t.Context(), general)
	require.NoError(t, err)
	inTx := h.src.Pick(2) == 0
	session := h.fast
	if inTx {
		tx, err := h.db.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: buckettest.One(h.src, pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable)})
		require.NoError(t, err)
		defer func() { require.NoError(t, tx.Commit(t.Context())) }()
		in := h.fast.InTx(tx, owner{h.db}, nil)
		session = &in
	}
	got, v, err := session.takeOne(t.Context(), fast, bucket.WindowStatement, nil)
	require.NoError(t, err)
	if v != undecided {
		h.byStatement++
		if totals := len(got[0].State.Parts.Taken); totals < len(h.before) && totals > 4 {
			h.trimmed++
		}
	} else {
		if len(h.before) > 2 && h.before[2] > 64*h.terms.Capacity {
			h.lowered++
		}
		got, err = session.takeByLocking(t.Context(), fast)
		require.NoError(t, err)
	}
	require.Equal(t, want[0].Allowed, got[0].Allowed, "%v of %+v at %d: %+v and %+v", cost, fast[0].Terms, h.now, want[0].State, got[0].State)
	require.Equal(t, want[0].Now, got[0].Now)
	if want[0].Allowed {
		requireSame(t, want[0].State, got[0].State)
	}
}

// look compares what the rows hold.
func (h *windowTwins) look(t *testing.T) {
	t.Helper()
	rows, err := h.db.Query(t.Context(), `SELECT value, ts, taken FROM ratelimit.buckets WHERE key = $1 ORDER BY name`, h.key)
	require.NoError(t, err)
	states, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (s bucket.State, err error) {
		s.Parts = &bucket.Parts{}
		return s, row.Scan(&s.Value, &s.TS, &s.Parts.Taken)
	})
	require.NoError(t, err)
	if len(states) == 0 {
		return
	}
	require.Len(t, states, 2)
	requireSame(t, states[0], states[1])
	h.before = states[0].Parts.Taken
}

func requireSame(t *testing.T, want, got bucket.State) {
	t.Helper()
	require.Equal(t, math.Float64bits(want.Value), math.Float64bits(got.Value), "%+v and %+v", want, got)
	require.Equal(t, want.TS, got.TS)
	require.Equal(t, want.Parts, got.Parts)
}
