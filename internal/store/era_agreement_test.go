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

// TestStatementsAgreeOverEras runs random histories of buckets whose terms change twice: by the calls, which choose the
// statement, and by locking. Every decision, value and ts agree to the last bit.
func TestStatementsAgreeOverEras(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	testsize.EachSeed(t, func(t *testing.T, seed uint64) {
		t.Helper()
		agreeOverEras(t, pool, seed)
	})
}

func agreeOverEras(t *testing.T, pool *pgxpool.Pool, seed uint64) {
	t.Helper()
	const calls = 60
	for i := range testsize.Of[uint64](1, 2) {
		h := &eraTwins{src: buckettest.Seeded{Rand: rand.New(rand.NewPCG(seed, i))}, now: opening - buckettest.Minute, history: fmt.Sprintf("history%d of %d", i, seed)}
		clock := func() *int64 { now := h.now; return &now }
		h.fast, h.general, h.db = newSession(pool, clock), newSession(pool, clock), pool
		for j := range 3 {
			h.lists = append(h.lists, drawOneRowEras(h.src))
			h.eras = append(h.eras, bucket.NewEras(h.lists[j]))
		}
		for range calls {
			h.step(t)
		}
	}
}

// eraTwins are buckets that are there twice, and go through the same history.
type eraTwins struct {
	src           buckettest.Seeded
	db            database
	fast, general *Session
	lists         [][]bucket.Era
	eras          []*bucket.Eras
	now           int64
	history       string
}

// drawOneRowEras draws eras of buckets that are not spread.
func drawOneRowEras(src buckettest.Source) []bucket.Era {
	eras := buckettest.DrawEras(src, buckettest.Everyday)
	for i := range eras {
		eras[i].Terms.Shards = 1
	}
	return eras
}

// asks returns the same asks for buckets of either twin, under the terms that hold, or under others that a process takes
// to hold.
func (h *eraTwins) asks(n int) (fast, general []bucket.Ask) {
	resolved := h.now
	if h.src.Pick(3) == 0 {
		resolved += int64((h.src.Unit()*2 - 1) * float64(buckettest.Day))
	}
	first := h.src.Pick(len(h.eras))
	for j := range n {
		i := (first + j) % len(h.eras)
		terms := h.eras[i].Holding(resolved)
		now := terms.At(h.now)
		cost := math.Round(min(terms.Capacity, now.Capacity)*h.src.Unit()*1024) / 1024
		lowest := -terms.MaxOwed * float64(h.src.Pick(2))
		if !buckettest.Possible(terms, cost, lowest) || !buckettest.Possible(now, cost, lowest) {
			cost = 0
		}
		for k, to := range []*[]bucket.Ask{&fast, &general} {
			*to = append(*to, bucket.Ask{
				Key: bucket.Key{Name: h.history + []string{"fast", "general"}[k], Key: fmt.Sprint("key", i)}, Terms: terms, Cost: cost, Lowest: lowest,
			})
		}
	}
	sortAsks(fast)
	sortAsks(general)
	return fast, general
}

func sortAsks(asks []bucket.Ask) {
	for i := range asks {
		for j := i; j > 0 && asks[j].Key.Compare(asks[j-1].Key) < 0; j-- {
			asks[j], asks[j-1] = asks[j-1], asks[j]
		}
	}
}

// advance moves the clock, mostly to the beginning of an era.
func (h *eraTwins) advance() {
	before, era := h.now, buckettest.One(h.src, buckettest.One(h.src, h.lists...)...)
	switch h.src.Pick(8) {
	case 0:
	case 1:
		h.now++
	case 2, 3:
		h.now += int64(h.src.Unit() * 2 * float64(buckettest.Period(era.Terms)) / max(era.Terms.Rate, 1))
	case 4, 5:
		if era.From > math.MinInt64 {
			h.now = max(h.now, era.From+int64(h.src.Pick(3)-1))
		}
	case 6:
		h.now = era.Terms.Begin(h.now) + era.Terms.Step - int64(h.src.Pick(2))
	default:
		h.now += int64(h.src.Unit() * float64(buckettest.Minute))
	}
	h.now = max(h.now, before) // a clock that steps back shows whether a full row has been written
}

// step makes one call on either twin.
func (h *eraTwins) step(t *testing.T) {
	t.Helper()
	h.advance()
	fast, general := h.asks(1 + h.src.Pick(3)/2*2)
	ctx := t.Context()
	switch chance := h.src.Pick(10); {
	case chance == 0:
		require.NoError(t, h.fast.Fill(ctx, fast))
		require.NoError(t, h.general.Fill(ctx, general))
	case chance == 1:
		amount := fast[0].Cost * float64(h.src.Pick(3)-1)
		require.NoError(t, h.fast.Charge(ctx, h.charge(fast, amount)))
		require.NoError(t, h.general.Charge(ctx, h.charge(general, amount)))
	case bucket.AllCostless(fast):
	default:
		h.take(t, fast, general, chance)
	}
	h.look(t, fast, general)
}

func (h *eraTwins) charge(asks []bucket.Ask, amount float64) Charge {
	c := Charge{Asks: asks, Amounts: make([]float64, len(asks)), Taken: make([]int64, len(asks))}
	for i := range asks {
		c.Amounts[i], c.Taken[i] = amount, bucket.Whenever
	}
	return c
}

// take takes by statements, in a batch, alone or in a transaction, and by locking.
func (h *eraTwins) take(t *testing.T, fast, general []bucket.Ask, chance int) {
	t.Helper()
	want, err := h.general.takeByLocking(t.Context(), general)
	require.NoError(t, err)
	var got []bucket.Answer
	owes := fast[0].Lowest < 0
	switch {
	case chance < 4:
		require.NoError(t, pgx.BeginTxFunc(t.Context(), h.db, pgx.TxOptions{}, func(tx pgx.Tx) (err error) {
			in := h.fast.InTx(tx, owner{h.db}, nil)
			c := taking(fast...)
			err = in.Decide(t.Context(), c)
			got = c.Answers
			return err
		}))
	case chance < 7 && !owes:
		call := taking(fast...)
		require.Empty(t, runBatch(t, h.fast, call))
		require.NoError(t, call.Result())
		got = call.Answers
	default:
		c := taking(fast...)
		require.NoError(t, h.fast.Decide(t.Context(), c))
		got = c.Answers
	}
	require.Equal(t, bucket.AllAllowed(want), bucket.AllAllowed(got), "%+v of %+v at %d: %+v, and by locking %+v", fast[0].Cost, fast[0].Terms, h.now, got, want)
	for i := range got {
		require.Equal(t, want[i].Allowed, got[i].Allowed)
		if want[i].Allowed && bucket.AllAllowed(want) {
			require.Equal(t, want[i].State, got[i].State)
		}
	}
}

// look compares what both twins hold.
func (h *eraTwins) look(t *testing.T, fast, general []bucket.Ask) {
	t.Helper()
	got, err := h.fast.Look(t.Context(), fast, nil)
	require.NoError(t, err)
	want, err := h.general.Look(t.Context(), general, nil)
	require.NoError(t, err)
	for i := range got {
		require.Equal(t, general[i].Terms, fast[i].Terms)
		if full := fast[i].Terms.Capacity; buckettest.Tokens(fast[i].Terms, want[i].State, h.now) == full && buckettest.Tokens(fast[i].Terms, got[i].State, h.now) == full {
			continue // since when does not matter
		}
		require.Equal(t, fast[i].Terms.FixClock(want[i].State, h.now), fast[i].Terms.FixClock(got[i].State, h.now), "in era %d", fast[i].Terms.Era)
	}
}
